"""Plans found again by the index tensors on the device, without reading them back in every layer.

Reading an index vector waits for the device, so a plan is kept together with the very tensors that it
was made from: while they are held nothing else can lie at their address, and a change in place shows in
their version.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from .runs import Array

T = TypeVar("T")

HELD_PLANS = 128

_held: OrderedDict[Hashable, tuple[tuple[Tensor, ...], Any]] = OrderedDict()
_lock = threading.Lock()


def remembered(
    vectors: tuple[Tensor, ...], options: tuple[Hashable, ...], make: Callable[..., T]
) -> T:
    """Return ``make(*vectors as host arrays)``, remembered for vectors on a GPU.

    Args:
        vectors: int64 index tensors.
        options: whatever else ``make`` depends on.
        make: is given one host array a vector.
    """
    if any(x.device.type == "cpu" or x.is_inference() for x in vectors):
        return make(*(_host(x) for x in vectors))

    def make_on_host() -> T:
        # plans of one layout share their vectors: each is read back once
        return make(*(_remembered((x,), ("host",), functools.partial(_host, x)) for x in vectors))

    return _remembered(vectors, options, make_on_host)


def _remembered(
    vectors: tuple[Tensor, ...], options: tuple[Hashable, ...], make: Callable[[], T]
) -> T:
    key = (options, *(_identity(x) for x in vectors))
    with _lock:
        if key in _held:
            _held.move_to_end(key)
            found: T = _held[key][1]
            return found
    plan = make()
    with _lock:
        _held[key] = (vectors, plan)
        while len(_held) > HELD_PLANS:
            _held.popitem(last=False)
    return plan


def _identity(x: Tensor) -> Hashable:
    return x.device, x.data_ptr(), x._version, tuple(x.shape), tuple(x.stride()), x.dtype


def _host(index: Tensor) -> Array:
    array: Array = np.asarray(index.detach().cpu().numpy(), dtype=np.int64)
    return array

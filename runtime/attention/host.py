"""What is made on the host from index tensors, found again without reading them back in every layer.

Reading an index vector waits for the device, and its contents cost time to compare on any device, so what
was made is kept together with the very tensors that it was made from: while they are held nothing else can
lie at their address, and a change in place shows in their version.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from .runs import Array

T = TypeVar("T")

HELD_PLANS = 256


class Held(Generic[T]):
    """What was made from tensors, by the tensors themselves; the oldest entries go.

    Args:
        size: most entries; each keeps its tensors alive.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, tuple[tuple[Tensor, ...], T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, vectors: tuple[Tensor, ...], options: tuple[Hashable, ...], make: Callable[[], T]
    ) -> T:
        """Return what ``make`` made when these very tensors came with these options, or call it now."""
        if any(x.is_inference() for x in vectors):  # these have no version
            return make()
        key = (options, *(_identity(x) for x in vectors))
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][1]
        made = make()
        with self._lock:
            self._entries[key] = (vectors, made)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


plans: Held[Any] = Held(HELD_PLANS)


def remembered(
    vectors: tuple[Tensor, ...], options: tuple[Hashable, ...], make: Callable[..., T]
) -> T:
    """Return ``make(*vectors as host arrays)``, remembered by the vectors themselves.

    Args:
        vectors: int64 index tensors, not written through NumPy, which no version tells.
        options: whatever else ``make`` depends on.
        make: is given one host array a vector.
    """

    def make_on_host() -> T:
        # plans of one layout share their vectors: each is read back once
        return make(*(plans.get((x,), ("host",), functools.partial(_host, x)) for x in vectors))

    made: T = plans.get(vectors, options, make_on_host)
    return made


def know(there: Tensor, here: Tensor) -> None:
    """Note what an index vector on a device holds: what is made from it need not read it back."""
    if there.device.type != "cpu":
        plans.get((there,), ("host",), functools.partial(_host, here))


def _identity(x: Tensor) -> Hashable:
    return x.device, x.data_ptr(), x._version, x.shape, x.stride(), x.dtype


def _host(index: Tensor) -> Array:
    array: Array = np.asarray(index.detach().cpu().numpy(), dtype=np.int64)
    return array

"""Replace all weights of a served module at once, or none."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError, did_you_mean
from spec_compile.ir.public_names import checkpoint_of, public_name


@contextlib.contextmanager
def read_to_end(named_tensors: Any) -> Iterator[Iterator[Any]]:
    """Give the items of an update; before an error leaves the block, the rest of them is read.

    An export is a collective: the peers of a reader that stopped half-way would wait for it.

    Raises:
        ConfigError: there is nothing to iterate over.
    """
    source = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if not isinstance(source, Iterable):
        raise ConfigError(
            f"weight update: expected (name, tensor) pairs or a state dict, found {type(source).__name__}"
        )
    items = iter(source)
    try:
        yield items
    except Exception:
        deque(items, maxlen=0)
        raise


def staged(module: nn.Module, named_tensors: Iterable[Any]) -> dict[str, Tensor]:
    """Copy a complete update into new tensors; the module is not touched.

    An alias of a tied parameter may be left out, but not disagree.

    Raises:
        ConfigError: a name is unknown, double or missing, a tensor does not fit, or an item is no
            (name, tensor).
    """
    name_of = type(module).__name__
    expected = checkpoint_of(module)
    found: dict[str, Tensor] = {}
    by_identity: dict[int, str] = {}
    for given, tensor in map(_pair, named_tensors):
        name = public_name(given)
        if name not in expected:
            raise ConfigError(f"weight update: {name_of} has no {given!r}{_near(name, expected)}")
        if name in found:
            raise ConfigError(f"weight update: {name!r} came twice")
        found[name] = _fitted(name, tensor, expected[name])
        first = by_identity.setdefault(id(expected[name]), name)
        if first != name:
            if not torch.equal(found[first], found[name]):
                raise ConfigError(
                    f"weight update: {first!r} and {name!r} are one tied parameter, but came with different values"
                )
            found[name] = found[first]
    missing = [name for name in expected if id(expected[name]) not in by_identity]
    if missing:
        raise ConfigError(
            f"weight update of {name_of} is incomplete: {len(missing)} of {len(expected)} tensors are missing, "
            f"the first is {missing[0]!r}; nothing was changed"
        )
    return found


def install(module: nn.Module, update: dict[str, Tensor]) -> None:
    """Put the tensors of `staged` in the place of the old ones."""
    held = checkpoint_of(module)
    for name, tensor in update.items():
        held[name].data = tensor


def _pair(item: Any) -> tuple[str, Any]:
    if not isinstance(item, (tuple, list)):
        raise ConfigError(
            f"weight update: expected (name, tensor) pairs, found {type(item).__name__}"
        )
    if len(item) != 2 or not isinstance(item[0], str):
        kinds = ", ".join(type(part).__name__ for part in item)
        raise ConfigError(f"weight update: expected (name, tensor) pairs, found ({kinds})")
    return item[0], item[1]


def _fitted(name: str, tensor: Any, held: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"weight update: {name!r} must be a tensor, found {type(tensor).__name__}"
        )
    if tuple(tensor.shape) != tuple(held.shape):
        raise ConfigError(
            f"weight update: {name!r} has shape {tuple(tensor.shape)}, expected {tuple(held.shape)}"
        )
    if tensor.is_meta:
        raise ConfigError(f"weight update: {name!r} is on the meta device and has no values")
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"weight update: {name!r} has layout {tensor.layout}; expected torch.strided, as to_dense() gives it"
        )
    if tensor.is_floating_point() != held.is_floating_point():
        raise ConfigError(f"weight update: {name!r} is {tensor.dtype}, expected {held.dtype}")
    # always a copy: the sender may reuse its buffer, and the trainer writes its weights in place
    return tensor.detach().to(device=held.device, dtype=held.dtype, copy=True).contiguous()


def _near(name: str, expected: dict[str, Any]) -> str:
    return did_you_mean(name, expected) or f"; it has {', '.join(list(expected)[:3])}, ..."

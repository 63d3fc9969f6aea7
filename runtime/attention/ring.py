"""The ring: K/V of every rank pass by every rank; in the backward their gradients travel along."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..fabric import Fabric
from .parts import Sum, zeros


def passing(fabric: Fabric, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (owner, that rank's tensors), own ones first; the next hop is under way meanwhile.

    Args:
        fabric: the group that forms the ring.
        tensors: own rows; the same shapes and dtypes on all ranks.
    """
    yield from _hops(fabric, tensors)
    fabric.flush()


def passing_with_grads(
    fabric: Fabric, tensors: list[Tensor], dtype: torch.dtype,
    visit: Callable[[int, list[Tensor]], list[Sum]],
) -> list[Tensor]:  # fmt: skip
    """Send tensors round once more, let every rank add to their gradients, and bring those home.

    Args:
        fabric: the group that forms the ring.
        tensors: own rows.
        dtype: of the gradients, also on the wire.
        visit: given (owner, tensors), returns this rank's share of their gradients.

    Returns:
        The gradients of the own rows, summed over ranks.
    """
    grads: list[Tensor] = []
    for hop, (owner, held) in enumerate(_hops(fabric, tensors)):
        shares = visit(owner, held)
        # what others added comes while this rank computes its share
        if hop:
            grads = _receive(fabric, grads, fabric.size + hop)
        else:
            grads = [zeros(x, dtype) for x in held]
        for share, total in zip(shares, grads, strict=True):
            share.onto(total)
        if fabric.size > 1:
            _send(fabric, grads, fabric.size + hop + 1)
    if fabric.size > 1:
        grads = _receive(fabric, grads, 2 * fabric.size)
        fabric.flush()
    return grads


def _hops(fabric: Fabric, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    held = [x.contiguous() for x in tensors]
    for hop in range(fabric.size):
        more = hop + 1 < fabric.size
        if more:
            _send(fabric, held, hop)
        yield (fabric.rank - hop) % fabric.size, held
        if more:
            held = _receive(fabric, held, hop)


def _send(fabric: Fabric, tensors: list[Tensor], hop: int) -> None:
    for i, x in enumerate(tensors):
        fabric.send(x, (fabric.rank + 1) % fabric.size, tag=len(tensors) * hop + i)


def _receive(fabric: Fabric, like: list[Tensor], hop: int) -> list[Tensor]:
    src = (fabric.rank - 1) % fabric.size
    return [fabric.recv(x.shape, x.dtype, src, tag=len(like) * hop + i) for i, x in enumerate(like)]

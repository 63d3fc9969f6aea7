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
    held = [x.contiguous() for x in tensors]
    for hop in range(fabric.size):
        more = hop + 1 < fabric.size
        if more:
            _send(fabric, held, hop)
        yield (fabric.rank - hop) % fabric.size, held
        if more:
            held = _receive(fabric, held, hop)
    fabric.flush()


def passing_with_grads(
    fabric: Fabric, tensors: list[Tensor], dtype: torch.dtype,
    visit: Callable[[int, list[Tensor]], list[Sum]],
) -> list[Tensor]:  # fmt: skip
    """Send tensors round once more, let every rank add to their gradients, and bring those home.

    Own tensors come last: gradients of the last hop travel meanwhile, and none starts at home to travel all
    round. Nothing hides the first hop, of half as many bytes as one of gradients where tensors are of a half type.

    Args:
        fabric: the group that forms the ring.
        tensors: own rows.
        dtype: of the gradients, also on the wire.
        visit: given (owner, tensors), returns this rank's share of their gradients.

    Returns:
        The gradients of the own rows, summed over ranks.
    """
    own = held = [x.contiguous() for x in tensors]
    size, last = fabric.size, fabric.size - 1
    grads: list[Tensor] = []
    if size > 1:
        _send(fabric, own, 0)
        held = _receive(fabric, own, 0)
    for hop in range(1, size):
        if hop < last:
            _send(fabric, held, hop)
        shares = visit((fabric.rank - hop) % size, held)
        # what others added has come while this rank computed its share
        grads = _receive(fabric, grads, size + hop) if hop > 1 else [zeros(x, dtype) for x in held]
        _add(shares, grads)
        del shares  # else they are held beside those of the next visit
        # before gradients leave: a receipt waits for all that was sent
        held = _receive(fabric, held, hop) if hop < last else own
        _send(fabric, grads, size + hop + 1)
    shares = visit(fabric.rank, own)
    grads = _receive(fabric, grads, 2 * size) if size > 1 else [zeros(x, dtype) for x in own]
    _add(shares, grads)
    fabric.flush()
    return grads


def _add(shares: list[Sum], grads: list[Tensor]) -> None:
    for share, total in zip(shares, grads, strict=True):
        share.onto(total)


def _send(fabric: Fabric, tensors: list[Tensor], hop: int) -> None:
    for i, x in enumerate(tensors):
        fabric.send(x, (fabric.rank + 1) % fabric.size, tag=len(tensors) * hop + i)


def _receive(fabric: Fabric, like: list[Tensor], hop: int) -> list[Tensor]:
    src = (fabric.rank - 1) % fabric.size
    return [fabric.recv(x.shape, x.dtype, src, tag=len(like) * hop + i) for i, x in enumerate(like)]

"""Rows of the packed row at anchors: gathers whose index every rank knows, because anchors alone make it.

Legend: T live rows, n rows of each rank, A anchors of all ranks, a of each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_compile.ir.operator import operator

from .context import current
from .fabric import Fabric
from .halo import Array
from .rows import bound_fabric, fabric_size


@operator("anchored_whole")
def anchored_whole(x: Tensor, index: Tensor, live_rows: int) -> Tensor:
    """``x[index]`` of a full-frame value; a negative index counts back from the last live row.

    Args:
        x: [cp * n, ...] by packed row, the same on all ranks, without gradient; any dtype.
        index: int64 [A, ...], packed rows.
        live_rows: T.

    Returns:
        [A, ..., ...].
    """
    return x[torch.where(index < 0, index + live_rows, index).clamp_min(0)]


@anchored_whole.register_fake
def _(x: Tensor, index: Tensor, live_rows: int) -> Tensor:
    return x.new_empty((*index.shape, *x.shape[1:]))


@operator("anchored_rows")
def anchored_rows(
    x: Tensor, index: Tensor, live_rows: int, slots: Tensor, anchor_slots: Tensor, fabric: str
) -> Tensor:
    """``x[index]`` across ranks, for this rank's anchors; only rows that another rank needs travel.

    Args:
        x: [n, ...], own rows; any dtype.
        index: int64 [A, ...], packed rows, the same on all ranks; negative counts back from row T.
        live_rows: T.
        slots: int64 [cp * n], the packed row at each slot.
        anchor_slots: int64 [A]: the anchor at each slot; rank r owns slots r * a to (r + 1) * a.
        fabric: name of the cp group.

    Returns:
        [a, ..., ...].
    """
    group = current().fabrics[fabric]
    moves = _moves(index, live_rows, slots, anchor_slots, group)
    entries = index.numel() // group.size
    out = x.new_zeros((entries, *x.shape[1:]))
    send = [x.index_select(0, rows) for rows in moves.reads]
    for rows, part in zip(moves.writes, _swap(send, moves.writes, x, group), strict=True):
        out.index_copy_(0, rows, part)
    return out.reshape(index.shape[0] // group.size, *index.shape[1:], *x.shape[1:])


@anchored_rows.register_fake
def _(
    x: Tensor, index: Tensor, live_rows: int, slots: Tensor, anchor_slots: Tensor, fabric: str
) -> Tensor:
    own = index.shape[0] // fabric_size(fabric)
    return x.new_empty((own, *index.shape[1:], *x.shape[1:]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, ctx.live_rows, slots, anchor_slots, ctx.name = inputs
    ctx.save_for_backward(index, slots, anchor_slots)
    ctx.rows = x.shape[0]
    ctx.fabric = bound_fabric(ctx.name)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    group = ctx.fabric or current().fabrics[ctx.name]
    index, slots, anchor_slots = ctx.saved_tensors
    moves = _moves(index, ctx.live_rows, slots, anchor_slots, group)
    grad = grad.reshape(-1, *grad.shape[index.ndim :])
    # several anchors may read one row: their gradients add up, in an accumulator's precision
    work = torch.promote_types(grad.dtype, torch.float32)
    out = grad.new_zeros((ctx.rows, *grad.shape[1:]), dtype=work)
    send = [grad.index_select(0, rows) for rows in moves.writes]
    for rows, part in zip(moves.reads, _swap(send, moves.reads, grad, group), strict=True):
        out.index_add_(0, rows, part.to(work))
    return out.to(grad.dtype), None, None, None, None, None


anchored_rows.register_autograd(_backward, setup_context=_setup)


@dataclass(frozen=True, eq=False)
class _Moves:
    """For each rank: own rows that it reads, and own entries to write with what it sends."""

    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


def _swap(
    send: Sequence[Tensor], receive: Sequence[Tensor], like: Tensor, group: Fabric
) -> list[Tensor]:
    """Exchange one part with each rank; a rank's own part does not travel."""
    if group.size == 1:
        return list(send)
    own = group.rank
    nothing = like.new_empty((0, *like.shape[1:]))
    parts = [nothing if r == own else part for r, part in enumerate(send)]
    shapes = [(0 if r == own else len(rows), *like.shape[1:]) for r, rows in enumerate(receive)]
    came = list(group.exchange(parts, shapes, like.dtype))
    came[own] = send[own]
    return came


def _moves(
    index: Tensor, live_rows: int, slots: Tensor, anchor_slots: Tensor, group: Fabric
) -> _Moves:
    host = [x.cpu().contiguous().numpy().tobytes() for x in (index, slots, anchor_slots)]
    return _lists(*host, live_rows, group.rank, group.size, str(index.device))


@functools.lru_cache(maxsize=64)
def _lists(
    index: bytes, slots: bytes, anchor_slots: bytes, live_rows: int, rank: int, size: int,
    device: str,
) -> _Moves:  # fmt: skip
    order: Array = np.frombuffer(slots, dtype=np.int64)
    anchors: Array = np.frombuffer(anchor_slots, dtype=np.int64)
    source = np.frombuffer(index, dtype=np.int64).reshape(len(anchors), -1)[anchors].reshape(-1)
    # unused anchors may point anywhere in front of the rows
    source = np.where(source < 0, source + live_rows, source).clip(min=0)
    if live_rows and len(source) and source.max() >= live_rows:
        raise IndexError(
            f"a draft reads row {source.max()} of a packed row of {live_rows} tokens; clamp the index to T - 1"
        )
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    come = place[source]
    n, a = len(order) // size, len(source) // size
    come_rank, to_rank = come // n, np.arange(len(source)) // a

    def listed(which: Array, mask: Any) -> Tensor:
        return torch.from_numpy(which[mask]).to(device)

    to = np.arange(len(source)) % a
    return _Moves(
        tuple(listed(come % n, (come_rank == rank) & (to_rank == r)) for r in range(size)),
        tuple(listed(to, (to_rank == rank) & (come_rank == r)) for r in range(size)),
    )

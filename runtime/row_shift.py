"""Shifts over the whole packed row, across documents: what roll, slice + pad and slice + cat become.

Dead rows neither read nor are read: a roll wraps at the live number of rows T.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_compile.ir.operator import operator

from .context import current
from .fabric import Fabric
from .halo import Array, Halo, exchange_of, move_
from .rows import bound_fabric


@operator("row_shift_whole")
def row_shift_whole(x: Tensor, k: int, ends: str, value: float, live_rows: int) -> Tensor:
    """``y[t] = x[t + k]`` of a full-frame value.

    Args:
        x: [cp * n, ...] by packed row, the same on all ranks, without gradient; any dtype.
        k: rows to look ahead; negative looks back.
        ends: "fill", "roll" or "join"; see `ir.ops.declared_row_shift`.
        value: for "fill", and for dead rows.
        live_rows: T; rows from here on are dead.

    Returns:
        [cp * n, ...].
    """
    source, inside = _sources(np.arange(x.shape[0]), k, ends, live_rows)
    out = _filled(x, value)
    to = torch.from_numpy(np.flatnonzero(inside)).to(x.device)
    return out.index_copy_(0, to, x.index_select(0, torch.from_numpy(source[inside]).to(x.device)))


@row_shift_whole.register_fake
def _(x: Tensor, k: int, ends: str, value: float, live_rows: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("row_shift_rows")
def row_shift_rows(
    x: Tensor, k: int, ends: str, value: float, slots: Tensor, live_rows: int, fabric: str
) -> Tensor:
    """``y[row t] = x[row t + k]`` across ranks; only rows that another rank needs travel.

    Args:
        x: [n, ...], own rows; any dtype.
        k: rows to look ahead; negative looks back.
        ends: "fill", "roll" or "join"; see `ir.ops.declared_row_shift`.
        value: for "fill", and for dead rows.
        slots: int64 [cp * n], the packed row at each slot.
        live_rows: T; packed rows from here on are dead.
        fabric: name of the cp group.

    Returns:
        [n, ...].
    """
    group = current().fabrics[fabric]
    halo = _halo(k, ends, slots, live_rows, group)
    out = _filled(x, value)
    move_(halo.reads, halo.writes, x, out, group)
    return out


@row_shift_rows.register_fake
def _(
    x: Tensor, k: int, ends: str, value: float, slots: Tensor, live_rows: int, fabric: str
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.k, ctx.ends, _, slots, ctx.live_rows, ctx.name = inputs
    ctx.save_for_backward(slots)
    ctx.fabric = bound_fabric(ctx.name)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (slots,) = ctx.saved_tensors
    group = ctx.fabric or current().fabrics[ctx.name]
    halo = _halo(ctx.k, ctx.ends, slots, ctx.live_rows, group)
    out = torch.zeros_like(grad, memory_format=torch.contiguous_format)
    # each row is read by one row at most, so the reverse needs no sum
    move_(halo.writes, halo.reads, grad, out, group)
    return out, None, None, None, None, None, None


row_shift_rows.register_autograd(_backward, setup_context=_setup)


def _filled(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, value, memory_format=torch.contiguous_format)


def _halo(k: int, ends: str, slots: Tensor, live_rows: int, group: Fabric) -> Halo:
    order: Array = slots.cpu().numpy()
    return _lists(k, ends, order.tobytes(), live_rows, group.rank, group.size, str(slots.device))


@functools.lru_cache(maxsize=256)
def _lists(
    k: int, ends: str, slots: bytes, live_rows: int, rank: int, size: int, device: str
) -> Halo:
    order: Array = np.frombuffer(slots, dtype=np.int64)
    source, inside = _sources(order, k, ends, live_rows)
    return exchange_of(source, inside, order, rank, size, device)


def _sources(order: Array, k: int, ends: str, live_rows: int) -> tuple[Array, Any]:
    """The row that each row of ``order`` reads, and where it reads one."""
    if ends == "join":
        k = max(-live_rows, min(live_rows, k))
    source = order + k
    if ends != "fill":
        source = source % max(live_rows, 1)
    inside = (order < live_rows) & (source >= 0) & (source < live_rows)
    return np.where(inside, source, 0), inside

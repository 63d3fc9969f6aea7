"""Row operators of a lowered graph: full frame to own rows and back, shifts, and sums over ranks.

Every operator is called by all ranks of its fabric in one order. Traced with fake values outside a
bound model, shapes are those of a single rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import InvariantError
from spec_compile.ir.operator import operator

from .context import current
from .fabric import Fabric
from .halo import halo_of, move_


@operator("shard_rows")
def shard_rows(x: Tensor, slots: Tensor, dim: int, fabric: str) -> Tensor:
    """Take this rank's rows of a full-frame value; it must not need a gradient.

    Args:
        x: [.., cp * n, ..] by packed row, the same on all ranks; any dtype.
        slots: int64 [cp * n], the packed row at each slot.
        dim: of the rows.
        fabric: name of the cp group.

    Returns:
        [.., n, ..].
    """
    if x.shape[dim] != slots.shape[0]:
        raise InvariantError(
            f"shard_rows expects {slots.shape[0]} rows in dimension {dim}, found {tuple(x.shape)}"
        )
    return x.index_select(dim, _own_slots(slots, current().fabrics[fabric]))


@shard_rows.register_fake
def _(x: Tensor, slots: Tensor, dim: int, fabric: str) -> Tensor:
    return _resized(x, dim, x.shape[dim] // fabric_size(fabric))


def _refuse_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if ctx.needs_input_grad[0]:
        raise InvariantError(
            "shard_rows was given a value that needs a gradient; full-frame values carry none: "
            "compute it on own rows, or detach it"
        )


def _no_grad(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
    return None, None, None, None


shard_rows.register_autograd(_no_grad, setup_context=_refuse_grad)


@operator("gather_rows")
def gather_rows(x: Tensor, fabric: str, dim: int) -> Tensor:
    """Concatenate all ranks' rows, in slot order; the gradient is summed over ranks.

    Args:
        x: [.., n, ..], own rows.
        fabric: name of the cp group.
        dim: of the rows.

    Returns:
        [.., cp * n, ..].
    """
    group = current().fabrics[fabric]
    if group.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    dim = dim % x.ndim
    return group.all_gather(x).movedim(0, dim).flatten(dim, dim + 1).contiguous()


@gather_rows.register_fake
def _(x: Tensor, fabric: str, dim: int) -> Tensor:
    return _resized(x, dim, x.shape[dim] * fabric_size(fabric))


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.name, dim = inputs
    ctx.dim = dim % x.ndim
    ctx.fabric = bound_fabric(ctx.name)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    group = _fabric(ctx)
    if group.size == 1:
        return grad, None, None
    # fabrics add halves in fp32, so only the result is rounded
    parts = grad.unflatten(ctx.dim, (group.size, -1)).movedim(ctx.dim, 0)
    return group.reduce_scatter(parts.contiguous()), None, None


gather_rows.register_autograd(_gather_backward, setup_context=_gather_setup)


@operator("shift_whole")
def shift_whole(x: Tensor, k: int, document: Tensor, live_rows: int) -> Tensor:
    """``y[t] = x[t + k]`` inside the same document, else 0 / False, of a full-frame value.

    Args:
        x: [cp * n, ...] by packed row, the same on all ranks, without gradient; any dtype.
        k: rows to look ahead; negative looks back.
        document: int64 [cp * n], full frame.
        live_rows: T; rows from here on are dead, neither read nor written.

    Returns:
        [cp * n, ...].
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    first, past = max(0, -k), live_rows - max(0, k)
    if first < past:
        y, same = x[first + k : past + k], document[first + k : past + k] == document[first:past]
        same = same.reshape(-1, *([1] * (x.ndim - 1)))
        if x.is_floating_point() or x.is_complex():
            out[first:past] = torch.where(same, y, 0.0)
        else:  # straight into its place; floats may be inf or nan
            torch.mul(y, same, out=out[first:past])
    return out


@shift_whole.register_fake
def _(x: Tensor, k: int, document: Tensor, live_rows: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("shift_rows")
def shift_rows(
    x: Tensor, k: int, document: Tensor, slots: Tensor, live_rows: int, fabric: str
) -> Tensor:
    """``y[row t] = x[row t + k]`` inside the same document, else 0 / False, across ranks.

    Only rows that another rank needs travel.

    Args:
        x: [n, ...], own rows; any dtype.
        k: rows to look ahead; negative looks back.
        document: int64 [cp * n], full frame.
        slots: int64 [cp * n].
        live_rows: T; packed rows from here on are dead, neither read nor written.
        fabric: name of the cp group.

    Returns:
        [n, ...].
    """
    group = current().fabrics[fabric]
    halo = halo_of(k, document, slots, live_rows, group)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    move_(halo.reads, halo.writes, x, out, group)
    return out


@shift_rows.register_fake
def _(x: Tensor, k: int, document: Tensor, slots: Tensor, live_rows: int, fabric: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shift_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.k, document, slots, ctx.live_rows, ctx.name = inputs
    ctx.save_for_backward(document, slots)
    ctx.fabric = bound_fabric(ctx.name)


def _shift_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    group = _fabric(ctx)
    document, slots = ctx.saved_tensors
    halo = halo_of(ctx.k, document, slots, ctx.live_rows, group)
    out = torch.zeros_like(grad, memory_format=torch.contiguous_format)
    # each row is read by one row at most, so the reverse needs no sum
    move_(halo.writes, halo.reads, grad, out, group)
    return out, None, None, None, None, None


shift_rows.register_autograd(_shift_backward, setup_context=_shift_setup)


@operator("sum_rows")
def sum_rows(x: Tensor, fabric: str) -> Tensor:
    """Sum over ranks; the gradient is summed over ranks too."""
    out = x.clone(memory_format=torch.contiguous_format)
    current().fabrics[fabric].all_reduce_(out)
    return out


@sum_rows.register_fake
def _(x: Tensor, fabric: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.name = inputs[1]
    ctx.fabric = bound_fabric(ctx.name)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    out = grad.clone(memory_format=torch.contiguous_format)
    _fabric(ctx).all_reduce_(out)
    return out, None


sum_rows.register_autograd(_sum_backward, setup_context=_sum_setup)


def _own_slots(slots: Tensor, group: Fabric) -> Tensor:
    n = slots.shape[0] // group.size
    return slots[group.rank * n : (group.rank + 1) * n]


def bound_fabric(name: str) -> Fabric | None:
    """The fabric for the backward, which may run on another thread; None while tracing."""
    try:
        return current().fabrics[name]
    except InvariantError:
        return None


def _fabric(ctx: Any) -> Fabric:
    fabric: Fabric | None = ctx.fabric
    return current().fabrics[ctx.name] if fabric is None else fabric


def fabric_size(name: str) -> int:
    """Ranks of the bound fabric; 1 while tracing."""
    fabric = bound_fabric(name)
    return 1 if fabric is None else fabric.size


def _resized(x: Tensor, dim: int, rows: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_empty(shape)

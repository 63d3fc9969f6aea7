"""Linear layers of which every row uses one out of several: the experts of a mixture.

Legend: T rows, k experts a row, E experts in all, R = T * k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT_BYTES = 16
GROUPED_SINCE = (8, 0)
"""CUDA capability from which torch has grouped products."""


@torch.library.custom_op("spec_compile::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool
) -> Tensor:
    """``y[t, j] = weight[e] @ x[t, j] + bias[e]`` with ``e = experts[t, j]``: rows stay apart.

    Args:
        x: [T, k, D_in].
        weight: [E, D_out, D_in], or [E, D_in, D_out] when ``transposed``.
        bias: [E, D_out], or None.
        experts: int64 [T, k], 0 to E - 1.
        transposed: order of the weight's dimensions.

    Returns:
        [T, k, D_out].
    """
    order, ends = _by_expert(experts, weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])[order]
    out = _unsorted(_products(rows, _right(weight, transposed), ends), order)
    if bias is not None:
        out += bias[experts.reshape(-1)]
    return out.reshape(*experts.shape, out.shape[-1])


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((*experts.shape, weight.shape[2 if transposed else 1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, experts, ctx.transposed = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, experts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, experts = ctx.saved_tensors
    order, ends = _by_expert(experts, weight.shape[0])
    sorted_grad = grad.reshape(-1, grad.shape[-1])[order]
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        products = _products(sorted_grad, _right(weight, not ctx.transposed), ends)
        grad_x = _unsorted(products, order).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        rows = x.reshape(-1, x.shape[-1])[order]
        left, right = (rows, sorted_grad) if ctx.transposed else (sorted_grad, rows)
        grad_weight = _outer_products(left, right, ends)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        chosen = F.one_hot(experts.reshape(-1), weight.shape[0]).to(grad.dtype)
        grad_bias = chosen.T @ grad.reshape(
            -1, grad.shape[-1]
        )  # unlike index_add, in a fixed order
    return grad_x, grad_weight, grad_bias, None, None


expert_linear.register_autograd(_backward, setup_context=_setup)


def _by_expert(experts: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Sort the R rows by expert: their order [R], and where each expert's rows end, int32 [E]."""
    ids = experts.reshape(-1)
    chosen = F.one_hot(ids, number).sum(0)
    return ids.argsort(stable=True), chosen.cumsum(0).to(torch.int32)


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows)


def _right(weight: Tensor, transposed: bool) -> Tensor:
    """Weights as right factors: [E, D_in, D_out] of the product at hand."""
    return weight if transposed else weight.transpose(1, 2)


def _products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [R, D_in] of each expert times its weight [D_in, D_out]: [R, D_out]."""
    if _can_group(rows, weight.shape[1], weight.shape[2]):
        return F.grouped_mm(rows, weight, offs=ends)
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, (low, high) in _spans(ends):
        torch.mm(rows[low:high], weight[expert], out=out[low:high])
    return out


def _outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sum of ``left[r] right[r]^T`` over the rows of each expert: [E, D_left, D_right]."""
    if _can_group(left, left.shape[1], right.shape[1]):
        out = F.grouped_mm(left.T, right, offs=ends)
        chosen = ends.diff(prepend=ends.new_zeros(1)) > 0
        return torch.where(chosen[:, None, None], out, 0.0)
    out = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, (low, high) in _spans(ends):
        torch.mm(left[low:high].T, right[low:high], out=out[expert])
    return out


def _spans(ends: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """(expert, its rows) for each expert that has some."""
    highs = ends.tolist()
    pairs = zip([0, *highs[:-1]], highs, strict=True)
    return [(expert, (low, high)) for expert, (low, high) in enumerate(pairs) if high > low]


def _can_group(rows: Tensor, *widths: int) -> bool:
    """Whether torch's grouped product takes these operands; products one by one give the same."""
    aligned = all(w * rows.element_size() % ALIGNMENT_BYTES == 0 for w in widths)
    able = not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= GROUPED_SINCE
    return rows.dtype == torch.bfloat16 and aligned and able and rows.shape[0] > 0

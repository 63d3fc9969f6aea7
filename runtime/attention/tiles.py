"""Runs the blocks of a plan: one tile of keys against this rank's query rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import Backend, accumulator
from .blocks import Block, BlockPlan


class Partial(NamedTuple):
    """Attention over a part of the keys, normalised over that part alone."""

    out: Tensor
    """[R, Hq, Dv]; arbitrary where lse is -inf."""
    lse: Tensor
    """[R, Hq], natural log; -inf where the row sees no key of the part."""


def attend(
    plan: BlockPlan, backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> list[Partial]:
    """Attend to one tile of keys; one partial a layer of the plan, none when nothing is visible.

    Args:
        plan: for these rows and keys.
        backend: computes the blocks.
        q: [R, Hq, D].
        k: [S, Hkv, D].
        v: [S, Hkv, Dv].
        scale: factor on the scores.
    """
    k, v = _sorted(plan, k), _sorted(plan, v)
    if len(plan.blocks) == 1 and plan.blocks[0].q0 == 0 and plan.blocks[0].q1 == q.shape[0]:
        return [Partial(*_forward(plan, plan.blocks[0], backend, q, k, v, scale))]
    shape, work = (q.shape[0], q.shape[1], v.shape[2]), accumulator(q.dtype)
    layers = [
        Partial(q.new_zeros(shape), q.new_full(shape[:2], -math.inf, dtype=work))
        for _ in range(plan.num_layers)
    ]
    for block in plan.blocks:
        out, lse = _forward(plan, block, backend, q, k, v, scale)
        layers[block.layer].out[block.q0 : block.q1] = out
        layers[block.layer].lse[block.q0 : block.q1] = lse
    return layers


class Merged(NamedTuple):
    """What the backward of every part needs of the whole softmax."""

    grad_out: Tensor
    """[R, Hq, Dv], contiguous."""
    out: Tensor
    """[R, Hq, Dv]."""
    lse: Tensor
    """[R, Hq]; +inf where a row sees nothing, so that its weights come out as exactly 0."""

    @classmethod
    def of(cls, grad_out: Tensor, out: Tensor, lse: Tensor) -> Merged:
        """Prepare the forward's results."""
        return cls(grad_out.contiguous(), out, lse.masked_fill(lse == -math.inf, math.inf))


def attend_backward_(
    plan: BlockPlan, backend: Backend, merged: Merged, q: Tensor, k: Tensor, v: Tensor,
    scale: float, grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Add this tile's gradients to ``grads``: dq [R, Hq, D], dk [S, Hkv, D], dv [S, Hkv, Dv].

    The sums are in the dtype of ``grads``: fp32, or fp64 for fp64.
    """
    dq, dk, dv = grads
    order = plan.order_on(k.device)
    k, v = _sorted(plan, k), _sorted(plan, v)
    dk_sorted = dk if order is None else torch.zeros_like(dk)
    dv_sorted = dv if order is None else torch.zeros_like(dv)
    for block in plan.blocks:
        rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
        parts = backend.backward(
            merged.grad_out[rows], q[rows], k[keys], v[keys], merged.out[rows], merged.lse[rows],
            mask=plan.additive_mask(block, q), causal=block.causal, scale=scale,
        )  # fmt: skip
        dq[rows] += parts[0]
        dk_sorted[keys] += parts[1]
        dv_sorted[keys] += parts[2]
    if order is not None:
        dk.index_add_(0, order, dk_sorted)
        dv.index_add_(0, order, dv_sorted)


def _forward(
    plan: BlockPlan, block: Block, backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    mask = plan.additive_mask(block, q)
    return backend.forward(q[rows], k[keys], v[keys], mask=mask, causal=block.causal, scale=scale)


def _sorted(plan: BlockPlan, x: Tensor) -> Tensor:
    order = plan.order_on(x.device)
    return x if order is None else x.index_select(0, order)

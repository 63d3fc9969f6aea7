"""Runs a plan: one tile of keys against this rank's query rows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spec_compile.codegen.attention import Cotangent
from spec_compile.codegen.row_dot import launch_row_dot
from spec_compile.codegen.triton_mode import triton_mode
from spec_compile.ir.dtypes import accumulator

from . import generated
from .blocks import BlockPlan
from .interface import Backend
from .runs import Block


class Partial(NamedTuple):
    """Attention over a part of the keys, normalised over that part alone."""

    out: Tensor
    """[R, Hq, Dv]; arbitrary where lse is -inf."""
    lse: Tensor
    """[R, Hq], natural log; -inf where the row sees no key of the part."""
    all_seen: bool = False
    """Whether ``out`` is defined in every row: 0 where lse is -inf."""


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
    if plan.covered_by_one_block:
        return [Partial(*_forward(plan, plan.blocks[0], backend, q, k, v, scale), all_seen=True)]
    shape, work = (q.shape[0], q.shape[1], v.shape[2]), accumulator(q.dtype)
    layers = []
    if plan.rest is not None:
        layers.append(Partial(*generated.attend(plan.rest, q, k, v, scale)))
    while len(layers) < plan.num_layers:
        layers.append(Partial(q.new_empty(shape), q.new_full(shape[:2], -math.inf, dtype=work)))
    for block in plan.blocks:
        out, lse = _forward(plan, block, backend, q, k, v, scale)
        layers[block.layer].out[block.q0 : block.q1] = out
        layers[block.layer].lse[block.q0 : block.q1] = lse
    return layers


@dataclass(frozen=True)
class Merged:
    """What the backward of every part needs of the whole softmax."""

    grad_out: Tensor
    """[R, Hq, Dv], contiguous."""
    out: Tensor
    """[R, Hq, Dv], contiguous."""
    lse: Tensor
    """[R, Hq]; +inf where a row sees nothing, so that its weights come out as exactly 0."""

    @classmethod
    def of(cls, grad_out: Tensor, out: Tensor, lse: Tensor) -> Merged:
        """Prepare the forward's results."""
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        return cls(grad_out.contiguous(), out.contiguous(), lse)

    @classmethod
    def of_sums(cls, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Merged:
        """The same without ``out``, which kernels read for nothing but its row sums with ``grad_out``.

        In its place stands its projection on ``grad_out``, which has the same ones.

        Args:
            grad_out: [R, Hq, Dv].
            lse: [R, Hq], as in `Merged`.
            delta: [R, Hq], row sums of grad_out * out.
        """
        size = grad_out.abs().amax(-1, keepdim=True).to(delta.dtype)
        size = size.masked_fill(size == 0, 1.0)  # a gradient of zeros has a delta of 0
        unit = grad_out / size
        norm = unit.square().sum(-1, keepdim=True).clamp_min(1.0)
        out = unit * (delta[..., None] / size / norm)
        merged = cls(grad_out, out.to(grad_out.dtype), lse.contiguous())
        merged.__dict__["delta"] = delta.contiguous()
        return merged

    @functools.cached_property
    def delta(self) -> Tensor:
        """[R, Hq], row sums of grad_out * out, in lse's dtype."""
        if triton_mode(self.out.device.type) == "triton":
            return launch_row_dot(self.grad_out, self.out)
        return (self.grad_out.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1)


def attend_backward_(
    plan: BlockPlan, backend: Backend, merged: Merged, q: Tensor, k: Tensor, v: Tensor,
    scale: float, grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Add this tile's gradients to ``grads``: dq [R, Hq, D], dk [S, Hkv, D], dv [S, Hkv, Dv].

    The tile's own sums are in fp32 (fp64 for fp64), as are ``grads``; dk and dv may be in a lower dtype
    when the keys of the plan are gathered, because each is then added to once.
    """
    dq, dk, dv = grads
    order = plan.order_on(k.device)
    k, v = _sorted(plan, k), _sorted(plan, v)
    dk_sorted = dk if order is None else torch.zeros_like(k, dtype=dq.dtype)
    dv_sorted = dv if order is None else torch.zeros_like(v, dtype=dq.dtype)
    if plan.rest is not None:
        cotangent = Cotangent(merged.grad_out, merged.lse, merged.delta)
        all_grads = (dq, dk_sorted, dv_sorted)
        generated.attend_backward_(plan.rest, cotangent, q, k, v, scale, all_grads)
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
        for whole, part in ((dk, dk_sorted), (dv, dv_sorted)):
            # every key comes once: no atomics, two runs give the same bits
            whole.index_copy_(0, order, whole.index_select(0, order) + part.to(whole.dtype))


def _forward(
    plan: BlockPlan, block: Block, backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    mask = plan.additive_mask(block, q)
    return backend.forward(q[rows], k[keys], v[keys], mask=mask, causal=block.causal, scale=scale)


def _sorted(plan: BlockPlan, x: Tensor) -> Tensor:
    order = plan.order_on(x.device)
    return x if order is None else x.index_select(0, order)

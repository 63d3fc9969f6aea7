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
from .parts import Sum
from .runs import Block

BLIND_SHARE = 0.25
"""Up to this share of rows that see nothing, a partial is written in every row: cheaper than to mask it later."""


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
        every_row = plan.rest.blind_share <= BLIND_SHARE
        out, lse = generated.attend(plan.rest, q, k, v, scale, every_row=every_row)
        layers.append(Partial(out, lse, all_seen=every_row))
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
        # one launch: -inf becomes +inf, nan stays
        lse = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.inf)
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
        norm = torch.linalg.vector_norm(grad_out, dim=-1, dtype=delta.dtype)
        # a gradient of zeros has a delta of 0; in two steps, because a square may underflow
        factor = torch.where(norm > 0, delta / norm / norm, 0.0)
        out = grad_out * factor[..., None]
        merged = cls(grad_out, out.to(grad_out.dtype), lse.contiguous())
        merged.__dict__["delta"] = delta.contiguous()
        return merged

    @functools.cached_property
    def delta(self) -> Tensor:
        """[R, Hq], row sums of grad_out * out, in lse's dtype."""
        if triton_mode(self.out.device.type) == "triton":
            return launch_row_dot(self.grad_out, self.out)
        return (self.grad_out.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1)


@dataclass(frozen=True)
class TileGrads:
    """Gradients of query rows and of one tile of keys."""

    q: Sum
    k: Sum
    v: Sum

    @classmethod
    def of(
        cls, plan: BlockPlan, q: Sum, k: Tensor, v: Tensor, *, dtype: torch.dtype | None = None
    ) -> TileGrads:
        """Start with nothing for the keys, whose sums run in ``dtype``; the plan may sort them.

        Args:
            plan: of the tile.
            q: goes on with that of other tiles.
            k: [S, Hkv, D], as the gradient is to be.
            v: [S, Hkv, Dv].
            dtype: None for that of k and v.
        """
        places = plan.places_on(k.device)
        return cls(q, *(Sum(x, dtype=dtype, places=places) for x in (k, v)))

    @classmethod
    def onto(cls, plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor) -> TileGrads:
        """Go on with contiguous sums, which are changed in place; `settle` brings in what is held."""
        places = plan.places_on(k.device)
        sums = (Sum(x, places=at, total=x) for x, at in ((q, None), (k, places), (v, places)))
        return cls(*sums)

    def settle(self, *, keep: int = 0) -> None:
        """Add all parts to the sums; those of the keys wait while they have at most ``keep`` rows."""
        self.q.settle()
        for total in (self.k, self.v):
            total.settle(keep=keep)

    def running(self, seen_share: float) -> tuple[Tensor, Tensor] | None:
        """Running sums of the keys, for a kernel that adds to this share of them; None where a part is cheaper."""
        if not all(total.in_place_pays(seen_share) for total in (self.k, self.v)):
            return None
        return self.k.running(), self.v.running()


def attend_backward(
    plan: BlockPlan, backend: Backend, merged: Merged, q: Tensor, k: Tensor, v: Tensor,
    scale: float, grads: TileGrads,
) -> None:  # fmt: skip
    """Add one tile's gradients to ``grads``, given the whole softmax."""
    k, v = _sorted(plan, k), _sorted(plan, v)
    for block in plan.backward_blocks(backend.most_keys):
        rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
        parts = backend.backward(
            merged.grad_out[rows], q[rows], k[keys], v[keys], merged.out[rows], merged.lse[rows],
            mask=plan.additive_mask(block, q), causal=block.causal, scale=scale,
        )  # fmt: skip
        firsts = (block.q0, block.k0, block.k0)
        for into, first, part in zip((grads.q, grads.k, grads.v), firsts, parts, strict=True):
            into.add(first, part)
        del parts, part
    if plan.rest is not None:
        cotangent = Cotangent(merged.grad_out, merged.lse, merged.delta)
        onto = grads.running(plan.rest.seen_share)
        dq, dk, dv = generated.attend_backward(plan.rest, cotangent, q, k, v, scale, onto=onto)
        grads.q.add(0, dq)
        if onto is None:
            grads.k.add(0, dk)
            grads.v.add(0, dv)


def _forward(
    plan: BlockPlan, block: Block, backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    mask = plan.additive_mask(block, q)
    return backend.forward(q[rows], k[keys], v[keys], mask=mask, causal=block.causal, scale=scale)


def _sorted(plan: BlockPlan, x: Tensor) -> Tensor:
    order = plan.order_on(x.device)
    return x if order is None else x.index_select(0, order)

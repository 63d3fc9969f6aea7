"""The two vectors of a policy loss: gathered to whole documents, aligned with the token itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.contract import TokenOutputs

from .fabric import Fabric
from .micro_batch import MicroBatch


def align(micro_batch: MicroBatch, by_slot: Tensor) -> Tensor:
    """[cp, n] values of the row that predicts -> [T] values of the token that is predicted, 0 at first tokens."""
    batch = micro_batch.batch
    packed = micro_batch.packed(by_slot)[: batch.num_tokens]
    if batch.num_tokens == 0:
        return packed
    moved = torch.cat([packed.new_zeros(1), packed[:-1]])
    return torch.where(batch.positions > 0, moved, moved.new_zeros(()))


def unalign(micro_batch: MicroBatch, grad: Tensor, cp_rank: int) -> Tensor:
    """Transpose of `align` for one rank: [T] gradients of tokens -> [n] gradients of own rows."""
    batch = micro_batch.batch
    total = micro_batch.slots.shape[0]
    packed = grad.new_zeros(total)
    if batch.num_tokens > 1:
        packed[: batch.num_tokens - 1] = torch.where(batch.positions > 0, grad, grad.new_zeros(()))[
            1:
        ]
    return packed[micro_batch.rows_of(cp_rank)]


def gather(micro_batch: MicroBatch, fabric: Fabric, local: Tensor) -> Tensor:
    """[n] values of own rows -> [T] aligned values, without gradient."""
    return align(micro_batch, fabric.all_gather(local.detach()))


def token_outputs(micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> TokenOutputs:
    """What a policy loss is called with."""
    batch = micro_batch.batch
    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy,
        mask=batch.loss_mask,
        tokens=batch.tokens,
        document=batch.document,
        cu_seqlens=batch.cu_seqlens,
        fields=batch.fields,
    )


class GatherAligned(torch.autograd.Function):
    """`gather` with a gradient: every rank computes the same loss, so each takes its own slice only."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, micro_batch: MicroBatch, fabric: Fabric, begin: Any
    ) -> Tensor:
        ctx.micro_batch, ctx.fabric, ctx.begin = micro_batch, fabric, begin
        return gather(micro_batch, fabric, local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.begin()
        return unalign(ctx.micro_batch, grads[0], ctx.fabric.rank), None, None, None


def gather_aligned(local: Tensor, micro_batch: MicroBatch, fabric: Fabric, begin: Any) -> Tensor:
    """`gather` with a gradient; ``begin`` is called when a backward arrives here."""
    out: Tensor = GatherAligned.apply(local, micro_batch, fabric, begin)  # type: ignore[no-untyped-call]
    return out

"""Differentiable outputs of a whole batch, for training loops that own the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.contract import TokenOutputs

from .calls import Caller
from .context import RunContext, bind
from .entry import Agreement
from .micro_batch import MicroBatch
from .results import ratio
from .tap_ops import HeldTaps
from .token_outputs import gather_aligned
from .world import World


def differentiable_rows(
    caller: Caller,
    world: World,
    agreed: Agreement,
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    draft: bool,
    begin: Callable[[], None],
    deadline_s: float,
) -> TokenOutputs:
    """Run all micro-batches, with gradient unless the caller is under no_grad, and join their rows in order.

    Args:
        begin: called when a backward reaches the outputs, before it reaches any parameter.
    """
    batch = agreed.batches[0].moved()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    sums: list[tuple[Tensor, Tensor]] = []
    device = world.device
    heat = torch.tensor(temperature, dtype=torch.float64, device=device)
    for micro_batch in micro_batches:
        inputs = {**micro_batch.graph_inputs(), "temperature": heat}
        with bind(RunContext(world.fabrics, HeldTaps(), options=caller.run_options)):
            made: list[Tensor] = []
            for stage in caller.graphs.values():  # all of them: pp == 1
                hidden = {"hidden": made[0]} if made else {}
                made = list(stage.policy(**inputs, **hidden))
            logprobs, entropy, *crossing = made
            cp = world.fabrics["cp"]
            both = [gather_aligned(x, micro_batch, cp, begin) for x in (logprobs, entropy)]
            parts.append((both[0], both[1], micro_batch.batch.rows))
            if draft and caller.last.draft is not None:
                given = {f"from_policy_{i}": x.detach() for i, x in enumerate(crossing)}
                loss_sum, count, *_ = micro_batch.draft_sums(caller.last.draft(**inputs, **given))
                sums.append((loss_sum, count.detach()))
    order = torch.cat([rows for _, _, rows in parts])
    inverse = torch.empty_like(order).index_copy_(
        0, order, torch.arange(order.shape[0], device=device)
    )
    outputs = TokenOutputs(
        logprobs=torch.cat([p[0] for p in parts])[inverse],
        entropy=torch.cat([p[1] for p in parts])[inverse],
        mask=batch.loss_mask,
        tokens=batch.tokens,
        document=batch.document,
        cu_seqlens=batch.cu_seqlens,
        fields=batch.fields,
    )
    if draft:
        outputs.draft_loss = _draft_loss(world, agreed, sums, begin, deadline_s)
    return outputs


def _draft_loss(
    world: World,
    agreed: Agreement,
    sums: Sequence[tuple[Tensor, Tensor]],
    begin: Callable[[], None],
    deadline_s: float,
) -> Tensor:
    """Global sum / global count in value; this rank's share of it in gradient."""
    own = torch.stack([s for s, _ in sums]).sum(0)
    own_count = torch.stack([c for _, c in sums]).sum(0)
    payload = [own.detach().double().tolist(), own_count.double().tolist()]
    replies: list[Any] = world.control.all_gather(payload, deadline_s=deadline_s)
    total = torch.tensor([r[0] for r in replies], dtype=torch.float64).sum(0)
    count = agreed.draft_count
    if count is None:
        count = torch.tensor([r[1] for r in replies], dtype=torch.float64).sum(0)
    safe = torch.where(count == 0, torch.ones_like(count), count)
    weight = torch.where(count == 0, torch.zeros_like(count), 1.0 / safe).to(own)
    local: Tensor = BeginBackward.apply((own * weight).sum(), begin)  # type: ignore[no-untyped-call]
    value = ratio(total, count).sum().to(local)
    return local + (value - local.detach())


class BeginBackward(torch.autograd.Function):
    """Identity that reports the start of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: Callable[[], None]) -> Tensor:
        ctx.begin = begin
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.begin()
        return grads[0], None

"""Logits inside the compiled training step equal those of a cached decoder that is fed the same tokens.

A wrapper around the draft multiplies what its head reads by a table, whose gradient after a step on four ranks
of two stages therefore holds it, by the row's token; no token comes twice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile import ParallelModel, Plan
from spec_compile.contract import DraftInputs, DraftOutput
from tests.models import packed_batch, tiny_qwen3
from tests.oracle import draft_inputs, run_target
from tests.parallel import run_models
from tests.rollout.test_served_equals_trained import (
    ANCHORS,
    BLOCKS,
    CHAINS,
    LENGTHS,
    assert_blocks,
    assert_chains,
    build,
    head_of,
    heard,
)

VOCAB, DIM = 61, 32


class Heard(nn.Module):
    """A draft whose loss tells what its head reads, step after step or slot after slot."""

    def __init__(self, draft: Any, number: int) -> None:
        super().__init__()
        self.draft, self.taps = draft, draft.taps
        if hasattr(draft, "block_size"):
            self.block_size, self.anchors_per_document = draft.block_size, 1
        self.tables = nn.Parameter(torch.zeros(number, VOCAB, DIM, dtype=torch.float64))

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        outputs, rows = heard(self.draft, inputs), inputs.tokens
        used = torch.ones_like(rows, dtype=torch.bool)
        if inputs.anchors is not None:
            outputs = list(outputs[0].unflatten(0, (inputs.anchors.shape[0], -1)).unbind(1))
            rows, used = rows[inputs.anchors.clamp(min=0)], inputs.anchors >= 0
        pairs = zip(outputs, self.tables, strict=True)
        losses = [(x * F.embedding(rows, t) * used[:, None]).sum() for x, t in pairs]
        return DraftOutput(torch.stack(losses).sum(), inputs.loss_mask.sum())


def compiled(draft: Any, target: Any, number: int, anchors: Tensor | None) -> Any:
    """Give the inputs of a batch of distinct tokens, and what the head read in its step, [number, V, D]."""
    batch = packed_batch(LENGTHS, vocab=VOCAB, draft_mask=True)
    batch.tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[: sum(LENGTHS)]
    batch.anchors = anchors
    made = draft_inputs(target, batch, run_target(target, batch, draft.taps, grad=False))

    def body(model: ParallelModel, rank: int) -> Tensor | None:
        model.step(batch, None, draft_denominator=1.0)
        tables: Any = getattr(model.draft, "tables", None)
        grad: Tensor | None = tables.grad
        return grad

    plan = Plan(cp=2, pp=2, micro_batches=2, verify=False)
    found = run_models(plan, target, Heard(draft, number), body)[-1]
    return dataclasses.replace(made, anchors=anchors), found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), CHAINS, ids=str)
def test_every_step_of_every_row_equals_a_cached_decoder(
    family: str, options: dict[str, Any]
) -> None:
    target = tiny_qwen3()
    draft = build(family, target, **options)
    inputs, found = compiled(draft, target, draft.num_draft_tokens, None)
    head = head_of(draft, target)
    assert_chains(draft, target, inputs, [F.linear(x[inputs.tokens], head) for x in found])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"), [BLOCKS[0], BLOCKS[2], BLOCKS[3], BLOCKS[-1]], ids=str
)
def test_every_block_equals_that_of_a_cached_decoder(family: str, options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = build(family, target, **options)
    inputs, found = compiled(draft, target, draft.block_size, ANCHORS)
    assert_blocks(draft, target, inputs, found[:, inputs.tokens[ANCHORS]].transpose(0, 1))

"""Losses of a draft against its teacher's law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.ops import shift

from .objective import distance

MASKS = {"predicted": 2, "embedded": 1, "previous": 0}
"""How far ahead of a row, at step 0, the token is whose mask decides whether the row counts."""


def chain_sums(
    rules: Any,
    inputs: DraftInputs,
    step: int,
    output: Tensor,
    weight: Tensor,
    columns: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum one step of a chain: weighted loss, count, and stats of the overlap of the laws.

    Row ``t`` predicts token ``t+2+step``; its teacher is the target's law of that token.

    Args:
        rules: conventions of the loss, by the names of `Eagle3Config`.
        inputs: of the draft.
        step: of the chain, from 0 on.
        output: [T, D], normed hidden states.
        weight: [V_d, D], the draft's head.
        columns: int64 [V_d], ids of the draft's tokens; None: all of the target's.
    """
    teacher = shift(inputs.teacher.hidden, step + 1, inputs.document)
    valid = _valid(rules.loss_mask_of, inputs, step)
    loss, overlap = distance(rules, output, weight, teacher, inputs.teacher, valid, columns)
    every = torch.ones_like(valid) if rules.loss_mean_over == "rows" else valid
    # the overlap is summed over the valid rows, whatever the loss is a mean of
    stats = {"acceptance": overlap, "acceptance_count": valid.sum()}
    return rules.loss_decay**step * loss, every.sum(), stats


def chain_output(sums: Sequence[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> DraftOutput:
    """Join what `chain_sums` gave for all steps: vectors, one entry a step."""
    losses, counts, stats = zip(*sums, strict=True)
    joined = {name: torch.stack([step[name] for step in stats]) for name in stats[0]}
    return DraftOutput(torch.stack(losses), torch.stack(counts), joined)


def _valid(token: str, inputs: DraftInputs, step: int) -> Tensor:
    """Tell whether each row counts at a step, bool [T]; a row without a teacher never does."""
    valid = shift(inputs.loss_mask, step + MASKS[token], inputs.document)
    if token == "previous":
        valid = valid & shift(torch.ones_like(valid), step + 1, inputs.document)
    return valid

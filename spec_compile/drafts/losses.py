"""Losses of a draft against its teacher's law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.contract import DraftInputs
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum one step of a chain: weighted loss, count, and overlap of the laws.

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
    return rules.loss_decay**step * loss, every.sum(), overlap


def _valid(token: str, inputs: DraftInputs, step: int) -> Tensor:
    """Tell whether each row counts at a step, bool [T]; a row without a teacher never does."""
    valid = shift(inputs.loss_mask, step + MASKS[token], inputs.document)
    if token == "previous":
        valid = valid & shift(torch.ones_like(valid), step + 1, inputs.document)
    return valid

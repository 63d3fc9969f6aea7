"""A draft around any expression of rows, and a step of it at cp=2 held to the dense oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.batch import PackedBatch
from tests.models import packed_batch, randomise, tiny_llama
from tests.oracle import dense_step
from tests.parallel import run_models

Expression = Callable[["RowDraft", sc.DraftInputs, Tensor], Any]
TARGET = tiny_llama(layers=1, hidden=8, vocab=13, heads=2, kv_heads=1)
LENGTHS = (7, 1, 5, 3)


class RowDraft(nn.Module):
    """Squares of what an expression makes of features h [T, 8] and its own weights."""

    taps = (0,)

    def __init__(self, expression: Expression) -> None:
        super().__init__()
        self.expression = expression
        self.w = nn.Parameter(torch.zeros(8, 8))
        self.table = nn.Parameter(torch.zeros(64, 8))
        self.vec = nn.Parameter(torch.zeros(8))
        self.keys = nn.Parameter(torch.zeros(3, 1, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        h = F.linear(inputs.features, self.w)
        result = self.expression(self, inputs, h)
        if isinstance(result, sc.DraftOutput):
            return result
        rows = result.reshape(result.shape[0], -1).to(h.dtype).square().sum(-1)
        return total(masked(rows, inputs), inputs)


def masked(rows: Tensor, inputs: sc.DraftInputs) -> Tensor:
    """Sum over valid rows."""
    return (rows * inputs.loss_mask).sum()


def total(loss: Tensor, inputs: sc.DraftInputs) -> sc.DraftOutput:
    return sc.DraftOutput(loss, inputs.loss_mask.sum())


def draft_of(expression: Expression) -> RowDraft:
    return randomise(RowDraft(expression).to(torch.float64), 3)


def lower_expression(expression: Expression) -> None:
    """Lower for cp=2; raises what the compiler has to say."""
    lower(TARGET, draft_of(expression), Plan(cp=2, verify=False))


def worst_difference(
    expression: Expression, *, cp: int = 2, pp: int = 1, lengths: tuple[int, ...] = LENGTHS
) -> float:
    """Largest relative difference of loss and draft gradients between a step and the oracle."""
    draft = draft_of(expression)
    batch: PackedBatch = packed_batch(lengths, vocab=13)
    wanted = dense_step(TARGET, draft, batch, None)

    def body(model: ParallelModel, rank: int) -> float:
        result = model.step(batch, None)
        assert model.draft is not None
        worst = abs(result.draft_loss - wanted.draft_loss) / (abs(wanted.draft_loss) + 1e-9)
        for name, parameter in model.draft.named_parameters():
            if parameter.device.type == "meta":  # of another stage
                continue
            want = wanted.draft_grads[name]
            got = torch.zeros_like(want) if parameter.grad is None else parameter.grad
            worst = max(worst, float((got - want).abs().max() / (want.abs().max() + 1e-9)))
        return worst

    torch.set_num_threads(1)
    return max(run_models(Plan(cp=cp, pp=pp, verify=False), TARGET, draft, body))

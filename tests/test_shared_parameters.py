"""Parameters that target and draft share: trained ones are refused, frozen ones stay on every rank that reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.errors import ConfigError

from .models import tiny_llama
from .oracle import dense_step
from .parallel import run_models
from .step_cases import assert_gradients, batches, clipped, gradients_of, joined


class Sharing(nn.Module):
    """Holds the target's own embedding and head."""

    taps = (1,)

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(8, dtype=torch.float64))
        self.table, self.head = target.model.embed_tokens, target.lm_head

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        label = sc.shift(inputs.tokens, 1, inputs.document)
        valid = sc.shift(inputs.loss_mask, 1, inputs.document)
        laws = self.head((inputs.features + self.table(inputs.tokens)) @ self.mix).log_softmax(-1)
        losses = -laws.gather(-1, label[:, None])[:, 0]
        return sc.DraftOutput((losses * valid).sum(), valid.sum())


def made() -> Any:
    return tiny_llama(layers=2, hidden=8, heads=2)


@pytest.mark.parametrize("frozen", ["embed_tokens", "lm_head"])
def test_a_trained_parameter_of_both_models_is_refused_by_name(frozen: str) -> None:
    target = made()
    for name, parameter in target.named_parameters():
        parameter.requires_grad_(frozen not in name)
    own, shared = {
        "embed_tokens": ("head.weight", "lm_head.weight"),
        "lm_head": ("table.weight", "model.embed_tokens.weight"),
    }[frozen]
    with pytest.raises(ConfigError, match=rf"draft's {own} is the target's {shared}, .*a copy"):
        lower(target, Sharing(target), Plan(cp=2))


@pytest.mark.slow
def test_frozen_parameters_of_both_models_are_read_across_stages() -> None:
    target, batch = made(), batches(1)[0]
    for part in (target.model.embed_tokens, target.lm_head):
        part.requires_grad_(False)
    draft = Sharing(target)
    wanted = dense_step(target, draft, batch, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        found = model.step(batch, clipped)
        assert found.draft_loss == pytest.approx(wanted.draft_loss, rel=1e-9)
        return gradients_of(model), dict(model.export_weights("draft"))

    outcomes = run_models(Plan(pp=2), target, draft, body)
    assert_gradients([grads for grads, _ in outcomes], joined(wanted))
    for _, weights in outcomes:
        for name in ("table.weight", "head.weight"):
            assert torch.equal(weights[name], draft.get_parameter(name))

"""Options of block drafts: the compiled step equals one device in loss and every gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from spec_compile import ParallelModel, Plan
from spec_compile.drafts import DFlash, DSpark
from tests.models import packed_batch, randomise, tiny_llama
from tests.oracle import dense_step
from tests.parallel import run_models

CASES: list[Any] = [
    pytest.param(DFlash, {"sample_from_anchor": True}, marks=pytest.mark.slow),
    pytest.param(DSpark, {"markov_head_type": "gated"}, marks=pytest.mark.slow),
    pytest.param(
        DFlash, {"layer_types": ("sliding_attention",), "sliding_window": 3}, marks=pytest.mark.slow
    ),
    pytest.param(
        DSpark, {"markov_head_type": "rnn", "sample_from_anchor": False}, marks=pytest.mark.slow
    ),
    pytest.param(
        DSpark,
        {"draft_vocab": torch.arange(0, 53, 9), "teacher_law": "draft"},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_step_equals_one_device(family: Any, options: dict[str, Any]) -> None:
    target = tiny_llama()
    draft = randomise(family.from_target(target, 4, num_hidden_layers=1, **options), seed=3)
    anchors = torch.tensor([0, 3, 4, 8, 10, 17, 22, -1])
    batch = dataclasses.replace(packed_batch((9, 14, 1), draft_mask=True), anchors=anchors)
    wanted = dense_step(target, draft, batch, None)

    def body(model: ParallelModel, rank: int) -> None:
        found = model.step(batch, None)
        assert abs(found.draft_loss - wanted.draft_loss) < 1e-9
        assert model.draft is not None
        for name, parameter in model.draft.named_parameters():
            grad = wanted.draft_grads[name]
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-8, atol=1e-10)
        evaluation = model.evaluate(batch)
        assert len(evaluation.acceptance) == draft.num_draft_tokens
        for j, share in enumerate(evaluation.acceptance):
            total, count = (wanted.draft_stats[f"slot_{n}/{j}"] for n in ("acceptance", "count"))
            assert share == pytest.approx(float(total / count), abs=1e-9)

    run_models(Plan(cp=2), target, draft, body)

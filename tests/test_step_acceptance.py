"""Predicted acceptance is a share of the tokens it sums over, whatever the loss is a mean of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_compile import ParallelModel, Plan
from spec_compile.drafts import DFlash, DSpark, Eagle3

from .models import packed_batch, randomise, tiny_llama
from .oracle import dense_step
from .parallel import run_models

CASES = [
    (Eagle3, {"ttt_length": 2}, {"loss_mean_over": "rows", "loss": "kl", "loss_decay": 0.3}),
    pytest.param(
        DFlash, {"block_size": 3}, {"loss_mean_over": "valid", "loss_type": "kl"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        DSpark, {"block_size": 3}, {"loss_mean_over": "valid", "ce_weight": 0.7},
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "sizes", "switches"), CASES, ids=["eagle3", "dflash", "dspark"])
def test_acceptance_is_the_same_whatever_the_switches(
    family: Any, sizes: dict[str, Any], switches: dict[str, Any]
) -> None:
    target = tiny_llama()
    batch = packed_batch((9, 14, 1), draft_mask=True)
    blocks = family is not Eagle3
    if blocks:
        sizes = {**sizes, "num_hidden_layers": 1}
        batch.anchors = torch.tensor([0, 3, 4, 8, 10, 17, 22, -1])
    plain, other = (
        randomise(family.from_target(target, **sizes, **more), 1) for more in ({}, switches)
    )
    wanted = dense_step(target, plain, batch, None)
    stats = wanted.draft_stats
    assert wanted.draft_loss != pytest.approx(dense_step(target, other, batch, None).draft_loss)
    mean = stats["acceptance"] / stats["acceptance_count"]
    shares = means = mean.reshape(-1).tolist()
    if blocks:
        slots = range(plain.num_draft_tokens)
        shares = [float(stats[f"slot_acceptance/{j}"] / stats[f"slot_count/{j}"]) for j in slots]

    def body(model: ParallelModel, rank: int) -> None:
        evaluation = model.evaluate(batch)
        assert evaluation.acceptance == pytest.approx(shares, abs=1e-9)
        for metrics in (evaluation.metrics, model.step(batch, None).metrics):
            names = [name for name in metrics if name.startswith("step/draft_acceptance")]
            assert [metrics[name] for name in names] == pytest.approx(means)

    run_models(Plan(cp=2, verify=False), target, other, body)

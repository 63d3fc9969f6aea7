"""Whole steps under each context-parallel strategy equal one process with dense attention."""

from __future__ import annotations

import pytest

from spec_compile import Plan
from spec_compile.runtime.balance import measure_balance
from spec_compile.runtime.calls import Caller
from spec_compile.runtime.kernel_cost import KernelCost
from spec_compile.runtime.layout import plan_layout
from tests.models import packed_batch

from .parallel import run_lowered
from .step_cases import check_step, clipped
from .test_step_anchors import LIBRARY, TARGETS, UNFRIENDLY, check, lowered_for


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "pass_q"])
def test_a_step_of_a_library_draft_equals_the_dense_step(name: str, strategy: str) -> None:
    check(name, cp=3, micro_batches=2, cp_strategy=strategy, policy_loss=clipped)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("target", ["qwen3", "llama_tied"])
def test_a_step_of_eagle3_by_visits_equals_the_dense_step(target: str, cp: int) -> None:
    check_step(target, "eagle3", Plan(cp=cp, pp=2, micro_batches=2, cp_strategy="pass_q"))


@pytest.mark.slow
def test_a_step_by_visits_with_recompute_equals_the_dense_step() -> None:
    plan = Plan(cp=2, pp=2, micro_batches=2, cp_strategy="pass_q", recompute="layers")
    check_step("qwen3", "eagle3", plan)


@pytest.mark.slow
def test_a_step_laid_out_by_the_cost_of_kernels_equals_the_dense_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Caller, "_agree_on_kernels", lambda _: KernelCost(1 << 5, 2))
    check_step("qwen3", "eagle3", Plan(cp=2, pp=2, micro_batches=2))


def test_a_step_reports_its_imbalance_and_padding() -> None:
    draft, lowered = lowered_for("dflash", "qwen3", 3, 1)
    batch = packed_batch(UNFRIENDLY, vocab=TARGETS["qwen3"].config.vocab_size)

    def body(model: object, rank: int) -> dict[str, float]:
        return dict(model.step(batch, clipped).metrics)  # type: ignore[attr-defined]

    rows = sum(UNFRIENDLY)
    padded = 3 * -(-rows // 3)
    rowwise = [a for a in lowered.facts.attentions if not a.slots]
    assert len(rowwise) < len(lowered.facts.attentions)
    least = measure_balance(plan_layout(UNFRIENDLY, 3), UNFRIENDLY, rowwise)
    for metrics in run_lowered(lowered, TARGETS["qwen3"], draft, body):
        assert metrics["step/padding"] == pytest.approx((padded - rows) / padded)
        assert 1.0 < metrics["step/imbalance"] < 1.6
        assert metrics["step/imbalance"] != pytest.approx(least.imbalance, rel=1e-6)

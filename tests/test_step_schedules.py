"""Schedules with several stages a rank: every step and call equals one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan, lower
from spec_compile.runtime import calls
from spec_compile.runtime.stage_run import StageRun

from .oracle import dense_step
from .parallel import run_models
from .step_cases import (
    assert_gradients,
    batches,
    bound,
    check_step,
    clipped,
    dense,
    gradients_of,
    joined,
    models,
)

DEEP = "qwen3_deep"
SCHEDULES = ["interleaved", "zero_bubble"]
ANCHORS = (0, 1, 6, 7, 19, 27, 28, 29, 50, 63, 64, 66, -1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("pp", "cp", "stages"),
    [
        pytest.param(2, 1, 2, marks=pytest.mark.slow),
        (2, 2, None),
        pytest.param(2, 1, 3, marks=pytest.mark.slow),
        pytest.param(3, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_step_with_several_stages_a_rank_equals_the_dense_step(
    schedule: str, pp: int, cp: int, stages: int | None
) -> None:
    plan = Plan(pp=pp, cp=cp, micro_batches=4, schedule=schedule, stages_per_rank=stages)
    check_step(DEEP, "eagle3", plan)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule(pp: int, cp: int) -> None:
    for schedule in ("gpipe", "1f1b", *SCHEDULES):
        for recompute in ("none", "layers"):
            plan = Plan(pp=pp, cp=cp, micro_batches=3, schedule=schedule, recompute=recompute)
            check_step(DEEP, "eagle3", plan)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule_of_a_block_draft(pp: int, cp: int) -> None:
    batch = dataclasses.replace(batches(1)[0], anchors=torch.tensor(ANCHORS))
    wanted = dense_step(*models(DEEP, "dflash"), [batch], clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(batch, clipped)
        return [result.policy_loss, result.draft_loss], gradients_of(model)

    for schedule in ("gpipe", "1f1b", *SCHEDULES):
        for recompute in ("none", "layers"):
            plan = Plan(pp=pp, cp=cp, micro_batches=3, schedule=schedule, recompute=recompute)
            found = bound(DEEP, "dflash", plan, body)
            for losses, _ in found:
                assert losses == pytest.approx([wanted.policy_loss, wanted.draft_loss], rel=1e-9)
            assert_gradients([grads for _, grads in found], joined(wanted))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 3, 7])
def test_step_with_any_number_of_micro_batches(schedule: str, micro_batches: int) -> None:
    check_step(DEEP, "gated", Plan(pp=2, micro_batches=micro_batches, schedule=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_step_with_tied_embeddings_and_recomputed_layers(schedule: str) -> None:
    plan = Plan(pp=2, micro_batches=2, schedule=schedule, recompute="layers")
    check_step("qwen3_deep_tied", "gated", plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_step_on_two_replicas(schedule: str) -> None:
    check_step(DEEP, "gated", Plan(pp=2, dp=2, micro_batches=2, schedule=schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_one_rank_equal_the_dense_step(schedule: str) -> None:
    check_step(DEEP, "eagle3", Plan(micro_batches=2, schedule=schedule, stages_per_rank=3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_calls_around_a_step_agree_with_one_stage_a_rank(schedule: str) -> None:
    """Log-probs, evaluation, norms, exported and saved weights; a draft alone; a second step."""

    def body(model: ParallelModel, rank: int) -> Any:
        batch = batches(1)[0]
        logprobs = model.logprobs(batch)
        evaluation = model.evaluate(batch)
        alone = model.step(batch, None)
        model.step(batch, clipped)
        norms = model.clip_grad_norm_(policy=0.5, draft=0.25)
        exported = {name: t.clone() for name, t in model.export_weights("policy")}
        state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        model.load_state_dict(model.state_dict())
        return logprobs, evaluation, alone, norms, exported, state

    plan = Plan(pp=2, micro_batches=2)
    target = "qwen3_deep_tied"
    plain = bound(target, "eagle3", plan, body)
    several = bound(target, "eagle3", dataclasses.replace(plan, schedule=schedule), body)
    for (logprobs, evaluation, alone, norms, exported, _), other in zip(
        plain, several, strict=True
    ):
        assert torch.equal(other[0], logprobs)
        assert other[1] == evaluation
        assert other[2] == alone
        assert other[3] == pytest.approx(norms, rel=1e-9)
        assert other[4].keys() == exported.keys()
        assert all(torch.equal(other[4][name], value) for name, value in exported.items())
    names = {name for state in (s[5] for s in plain) for name in state}
    assert {name for state in (s[5] for s in several) for name in state} == names


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, micro_batches=2, recompute="layers"),
        Plan(pp=2, micro_batches=2, schedule="interleaved", stages_per_rank=3),
        Plan(pp=2, micro_batches=2, schedule="zero_bubble", recompute="layers"),
        Plan(pp=3, micro_batches=2, schedule="interleaved"),
    ],
    ids=["1f1b", "interleaved3", "zero_bubble", "pp3"],
)
def test_log_probs_and_the_draft_have_the_bits_of_one_rank(plan: Plan) -> None:
    """The draft's losses and acceptance are functions of the taps."""

    def body(model: ParallelModel, rank: int) -> Any:
        batch = batches(1)[0]
        result = model.step(batch, clipped)
        return model.logprobs(batch), model.evaluate(batch), result.draft_loss

    ((logprobs, evaluation, loss),) = bound(DEEP, "eagle3", Plan(micro_batches=2), body)
    for found in bound(DEEP, "eagle3", plan, body):
        assert torch.equal(found[0], logprobs)
        assert found[1:] == (evaluation, loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_of_several_stages_on_one_rank_are_differentiable(schedule: str) -> None:
    wanted = dense(DEEP, "eagle3", 1)

    def body(model: ParallelModel, rank: int) -> Any:
        batch = batches(1)[0]
        rows = model(batch)
        loss, _ = clipped(rows)
        assert rows.draft_loss is not None
        (loss / int(rows.mask.sum()) + rows.draft_loss).backward()
        model.finalize_grads()
        return gradients_of(model)

    plan = Plan(micro_batches=2, schedule=schedule, stages_per_rank=2)
    assert_gradients(bound(DEEP, "eagle3", plan, body), joined(wanted))


class WatchedRun(StageRun):
    """Notes which parameters' gradients change in which half of a split backward."""

    activations: ClassVar[set[str]] = set()
    weights: ClassVar[set[str]] = set()

    def backward(self, mb: int, grad: Tensor | None, *, weights: bool = True) -> Tensor | None:
        assert not weights
        before = self.norms()
        result = super().backward(mb, grad, weights=weights)
        self.activations.update(n for n, norm in self.norms().items() if norm != before[n])
        return result

    def backward_weights(self, mb: int) -> None:
        before = self.norms()
        super().backward_weights(mb)
        self.weights.update(n for n, norm in self.norms().items() if norm != before[n])

    def norms(self) -> dict[str, float | None]:
        return {
            name: None if p.grad is None else float(p.grad.norm())
            for name, p in self.graphs.policy.named_parameters()
        }


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_zero_bubble_leaves_all_gradients_of_linear_layers_for_later(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "StageRun", WatchedRun)
    WatchedRun.activations.clear()
    WatchedRun.weights.clear()
    plan = Plan(pp=2, micro_batches=2, schedule="zero_bubble", recompute=recompute)
    bound(DEEP, "none", plan, lambda model, rank: model.step(batches(1)[0], clipped))
    assert len(WatchedRun.weights) == 7 * 8  # matrices of a layer, layers
    assert all(name.endswith("_proj.weight") for name in WatchedRun.weights)
    assert not WatchedRun.weights & WatchedRun.activations
    assert any("norm" in name for name in WatchedRun.activations)


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_zero_bubble_in_bfloat16_equals_one_stage_a_rank(recompute: str) -> None:
    def body(model: ParallelModel, rank: int) -> dict[str, Tensor | None]:
        model.step(batches(1, dtype=torch.float32)[0], clipped)
        return gradients_of(model)

    plan = Plan(pp=2, micro_batches=2, param_dtype="bfloat16", recompute=recompute)
    found: dict[str, dict[str, Tensor | None]] = {"1f1b": {}, "zero_bubble": {}}
    for schedule, grads in found.items():
        several = dataclasses.replace(plan, schedule=schedule, stages_per_rank=1)
        for owned in bound("llama_float32", "none", several, body):
            grads.update(owned)
    assert_gradients([found["zero_bubble"]], _present(found["1f1b"]), tolerance=1e-2)


def _present(grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if grad is not None}


def test_frozen_layers_have_no_gradient_under_zero_bubble() -> None:
    target, draft = models(DEEP, "none")
    target = copy.deepcopy(target)
    for layer in target.model.layers[:3]:
        layer.requires_grad_(False)
    plan = Plan(pp=2, micro_batches=2, schedule="zero_bubble", verify=False)
    outcomes = run_models(
        plan,
        target,
        draft,
        lambda model, rank: (model.step(batches(1)[0], clipped), gradients_of(model))[1],
    )
    wanted = joined(dense(DEEP, "none", 1))
    frozen = tuple(f"policy.model.layers.{layer}." for layer in range(3))
    assert_gradients(outcomes, {n: g for n, g in wanted.items() if not n.startswith(frozen)})


def test_stages_go_round_the_ranks() -> None:
    def body(model: ParallelModel, rank: int) -> set[int]:
        names = [n for n, p in model.target.named_parameters() if p.device.type != "meta"]
        return {int(n.split(".")[2]) for n in names if n.startswith("model.layers.")}

    plan = Plan(pp=2, schedule="interleaved", stages_per_rank=2)
    assert bound(DEEP, "none", plan, body) == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_explain_tells_where_stages_lie_and_how_many_slots_taps_have() -> None:
    plan = Plan(pp=2, micro_batches=8, schedule="zero_bubble", recompute="layers", verify=False)
    text = lower(*models(DEEP, "eagle3"), plan).explain()
    assert "stage 0 on pipeline rank 0: layers 0..1 + embedding" in text
    assert "stage 3 on pipeline rank 1: layers 7..7 + norm, head, policy loss, draft" in text
    assert "one write a micro-batch into 2 slots" in text
    assert "recompute: the backward runs each decoder layer again" in text
    assert "their gradients are computed apart" in text

"""``requires_grad`` changed after parallelize: freezing is one device's, unfreezing is refused on every rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_compile import ParallelModel, Plan
from spec_compile.errors import BatchError, ConfigError

from .models import randomise
from .oracle import dense_step
from .parallel import run_lowered, run_models
from .step_cases import (
    assert_gradients,
    batches,
    bound,
    clipped,
    gradients_of,
    joined,
    lowered_for,
    models,
)
from .test_step_training import CountsActivations


def flip(target: Any, draft: Any, names: set[str], flag: bool) -> None:
    """Set the flag of parameters by "policy." or "draft." name, those on other stages too."""
    left = set(names)
    for prefix, module in (("policy", target), ("draft", draft)):
        for name, parameter in module.named_parameters() if module is not None else ():
            if f"{prefix}.{name}" in names:
                parameter.requires_grad_(flag)
                left.discard(f"{prefix}.{name}")
    assert not left


LATE = "policy.model.layers.2.mlp.up_proj.weight"
EARLY = "policy.model.layers.0.input_layernorm.weight"
TIED = "policy.model.embed_tokens.weight"
DRAFT = "draft.fc.weight"


def bound_frozen(plan: Plan, names: set[str], body: Callable[[ParallelModel, int], None]) -> None:
    """Bind models of which some parameters were frozen before."""
    structure = Plan(cp=plan.cp, pp=plan.pp, verify=False)
    target, draft, lowered = copy.deepcopy(lowered_for("llama_tied", "eagle3", structure))
    flip(target, draft, names, False)
    run_lowered(dataclasses.replace(lowered, plan=plan), target, draft, body)


def test_a_parameter_unfrozen_after_parallelize_is_refused_by_name_on_every_rank() -> None:
    batch, names = batches(1)[0], {EARLY, LATE, DRAFT, TIED}

    def body(model: ParallelModel, rank: int) -> None:
        model.step(batch, clipped)
        before = gradients_of(model)
        for name in sorted(names):
            flip(model.target, model.draft, {name}, True)
            with pytest.raises(ConfigError, match=rf"step found {name} with.*parallelize again"):
                model.step(batch, clipped)
            for key, grad in gradients_of(model).items():
                torch.testing.assert_close(grad, before[key], rtol=0, atol=0)
            flip(model.target, model.draft, {name}, False)
        model.step(batch, clipped)

    bound_frozen(Plan(cp=2, pp=2), names, body)


@pytest.mark.slow
def test_a_parameter_unfrozen_on_one_rank_alone_is_refused_on_all() -> None:
    def body(model: ParallelModel, rank: int) -> None:
        if rank == 1:
            flip(model.target, model.draft, {LATE}, True)
        kind = ConfigError if rank == 1 else BatchError
        for call in (lambda: model.step(batches(1)[0], clipped), lambda: model(batches(1)[0])):
            with pytest.raises(kind, match=LATE):
                call()
        with torch.no_grad():
            model(batches(1)[0])
        model.logprobs(batches(1)[0])

    bound_frozen(Plan(cp=2), {LATE}, body)


TIED_PLAN = Plan(cp=2, pp=2, micro_batches=2)
ZERO_BUBBLE = Plan(pp=2, micro_batches=2, schedule="zero_bubble")
RECOMPUTE = Plan(pp=2, micro_batches=2, recompute="layers")
DEEP, SLOW = "qwen3_deep", pytest.mark.slow
PLANS = [
    pytest.param("llama_tied", TIED_PLAN, {EARLY, LATE, TIED, DRAFT}, id="tied"),
    pytest.param(DEEP, ZERO_BUBBLE, {LATE, DRAFT}, id="zero_bubble", marks=SLOW),
    pytest.param(DEEP, RECOMPUTE, {EARLY, LATE}, id="recompute", marks=SLOW),
]


@pytest.mark.parametrize(("target", "plan", "names"), PLANS)
def test_parameters_frozen_after_parallelize_get_no_gradient_and_the_others_one_devices(
    target: str, plan: Plan, names: set[str]
) -> None:
    given = batches(plan.dp)
    frozen = copy.deepcopy(models(target, "eagle3"))
    flip(*frozen, names, False)
    wanted = dense_step(*frozen, given, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        flip(model.target, model.draft, names, False)
        model.step(given[model.dp_rank], clipped)
        return gradients_of(model)

    assert_gradients(bound(target, "eagle3", plan, body), joined(wanted))


@pytest.mark.slow
def test_what_was_accumulated_before_freezing_stays_and_training_again_is_allowed() -> None:
    batch = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        model.step(batch, clipped)
        once = gradients_of(model)
        flip(model.target, model.draft, {LATE, DRAFT}, False)
        model.step(batch, clipped)
        for name, grad in gradients_of(model).items():
            was = once[name]
            assert grad is not None
            assert was is not None
            factor = 1 if name in (LATE, DRAFT) else 2
            torch.testing.assert_close(grad, factor * was, rtol=1e-9, atol=1e-12)
        flip(model.target, model.draft, {LATE, DRAFT}, True)
        model.step(batch, clipped)
        grad, was = gradients_of(model)[LATE], once[LATE]
        assert was is not None
        torch.testing.assert_close(grad, 2 * was, rtol=1e-9, atol=1e-12)

    bound("llama", "eagle3", Plan(cp=2), body)


@pytest.mark.slow
def test_a_draft_partly_frozen_later_trains_where_counts_depend_on_activations() -> None:
    plan = Plan(cp=2, micro_batches=2, verify=False)
    target, draft = models("llama", "none")[0], randomise(CountsActivations(), 4)
    frozen = copy.deepcopy(draft)
    flip(None, frozen, {"draft.mix.bias"}, False)
    wanted = dense_step(target, frozen, batches(1), clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        flip(None, model.draft, {"draft.mix.bias"}, False)
        model.step(batches(1)[0], clipped)
        return gradients_of(model)

    assert_gradients(run_models(plan, target, draft, body), joined(wanted))


@pytest.mark.parametrize(("name", "plan", "odd"), [
    (LATE, Plan(cp=2, pp=2), 3), (TIED, Plan(cp=2, pp=2), 0),
    pytest.param(DRAFT, Plan(dp=2), 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_ranks_that_freeze_different_parameters_are_told_so(
    name: str, plan: Plan, odd: int
) -> None:
    given = batches(plan.dp)

    def body(model: ParallelModel, rank: int) -> None:
        if rank == odd:
            flip(model.target, model.draft, {name}, False)
        mine = name if rank == odd else "none"
        with pytest.raises(ConfigError, match=f"froze different ones.*this rank froze {mine}"):
            model.step(given[model.dp_rank], clipped)
        flip(model.target, model.draft, {name}, False)
        model.step(given[model.dp_rank], clipped)

    bound("llama_tied", "eagle3", plan, body)

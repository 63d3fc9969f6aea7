"""One step of every plan equals one process with dense attention."""

from __future__ import annotations

import itertools

import pytest

from spec_compile import Plan

from .step_cases import check_step

SIZES = ((1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2))
"""(cp, pp, dp)."""


@pytest.mark.parametrize(
    ("cp", "pp", "dp"),
    [pytest.param(*s, marks=[pytest.mark.slow] if s[0] == 4 else []) for s in SIZES],
)
def test_step_of_eagle3_equals_the_dense_step(cp: int, pp: int, dp: int) -> None:
    check_step("qwen3", "eagle3", Plan(cp=cp, pp=pp, dp=dp, micro_batches=2))


@pytest.mark.parametrize("draft", ["gated", "window", "none"])
def test_step_of_an_own_draft_equals_the_dense_step(draft: str) -> None:
    check_step("llama", draft, Plan(cp=2, pp=2, micro_batches=2))


@pytest.mark.parametrize(
    "target", ["llama_tied", pytest.param("qwen3_tied", marks=pytest.mark.slow)]
)
def test_step_with_tied_embeddings_equals_the_dense_step(target: str) -> None:
    check_step(target, "gated", Plan(cp=1, pp=2, micro_batches=2))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_step_does_not_depend_on_micro_batches_or_schedule(
    schedule: str, micro_batches: int
) -> None:
    plan = Plan(cp=2, pp=2, micro_batches=micro_batches, schedule=schedule)
    check_step("qwen3", "eagle3", plan)


def test_step_with_fewer_micro_batches_than_stages() -> None:
    check_step("llama", "gated", Plan(pp=3, micro_batches=1))


def test_step_with_micro_batches_chosen_by_size() -> None:
    plan = Plan(cp=2, dp=2, max_tokens_per_micro_batch=36)
    check_step("qwen3", "eagle3", plan)


@pytest.mark.slow
def test_float32_step_is_within_1e4_of_the_dense_step() -> None:
    check_step("llama_float32", "gated", Plan(cp=2, pp=2, micro_batches=2), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["qwen3", "llama", "qwen3_tied", "llama_tied"])
@pytest.mark.parametrize("draft", ["eagle3", "gated", "window"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_every_plan(target: str, draft: str, strategy: str) -> None:
    for (cp, pp, dp), micro_batches, schedule in itertools.product(
        (*SIZES, (1, 3, 1)), (1, 2, 3), ("1f1b", "gpipe")
    ):
        if strategy == "all_gather" and cp == 1:
            continue
        plan = Plan(
            cp=cp,
            pp=pp,
            dp=dp,
            micro_batches=micro_batches,
            schedule=schedule,
            cp_strategy=strategy,
        )
        check_step(target, draft, plan)

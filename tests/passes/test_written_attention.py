"""Attention written by hand is the declared operator where a draft asks for it and both compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile import Plan, lower
from spec_compile.errors import PlanError
from tests.models import packed_batch, randomise
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.passes.test_recognise_attention import (
    ANCHORS,
    DIM,
    LENGTHS,
    VOCAB,
    check_step,
    of_draft,
    target,
)
from tests.spelled_drafts import HEADS, SpelledBlocks
from tests.written_drafts import WRITINGS, WrittenSteps, added, flat, joined

QUICK = ("flat",)


def written(attend: Any, **options: Any) -> WrittenSteps:
    return randomise(WrittenSteps(DIM, VOCAB, attend, **options).double(), 3)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WRITINGS]
)
def test_a_draft_that_writes_its_softmax_steps_like_the_eager_one(name: str) -> None:
    draft = written(WRITINGS[name], steps=2 if name in QUICK else 3)
    lowered = lower(target(), draft, Plan(cp=2))
    kinds = [(), ("diagonal",), ("diagonal", "diagonal")]
    assert [fact.branches for fact in of_draft(lowered)] == kinds[: draft.steps]
    few = 4 if name == "flat" else 2  # it takes heads apart from the batch behind the copies
    assert {fact.heads for fact in of_draft(lowered)} == {(4, few)}
    assert "proved by execution and recognised as: main keys s < index + 1" in lowered.explain()
    # one of them takes its softmax in fp32
    check_step(draft, lowered, tolerance=1e-4 if name == "concatenated" else 1e-9)


@pytest.mark.slow
def test_a_softmax_in_fp32_is_recognised_in_a_draft_of_bf16() -> None:
    draft = written(WRITINGS["concatenated"], steps=2).bfloat16()
    model, batch = target().bfloat16(), packed_batch(LENGTHS, vocab=VOCAB, seed=4)
    wanted = dense_step(model, draft, batch, None).draft_loss
    lowered = lower(model, draft, Plan(cp=2))
    for found in run_lowered(lowered, model, draft, lambda m, _: m.step(batch, None).draft_loss):
        assert found == pytest.approx(wanted, rel=2e-2)


@pytest.mark.slow
def test_a_written_block_draft_steps_like_the_eager_one() -> None:
    draft = randomise(SpelledBlocks(DIM, VOCAB, causal=True, written=True).double(), 3)
    draft.spec_compile_recognise = "execution"  # type: ignore[assignment]
    lowered = lower(target(), draft, Plan(cp=2))
    assert [fact.branches for fact in of_draft(lowered)] == [("block",) * 3] * 2
    check_step(draft, lowered, anchors=ANCHORS)


def test_without_the_opt_in_a_written_softmax_is_refused_and_the_opt_in_named() -> None:
    draft = written(flat, steps=1, opt_in=False)
    with pytest.raises(PlanError, match="spec_compile_recognise = 'execution'") as caught:
        lower(target(), draft, Plan(cp=2, verify=False))
    assert "written_drafts.py:" in str(caught.value)
    assert "(softmax)" in str(caught.value)
    assert "sc.branch_attention(" in str(caught.value)


def test_an_unknown_opt_in_is_refused() -> None:
    draft = written(flat, steps=1)
    draft.spec_compile_recognise = "always"
    with pytest.raises(PlanError, match="must be 'mask', or 'execution'"):
        lower(target(), draft, Plan(verify=False))


def of_sizes(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Scores without their sign."""
    scores = (q @ keys[0].mT).abs() + added(mask, q.dtype)
    return scores.softmax(-1) @ values[0]


def two_scales(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    scores = [q @ keys[0].mT + added(mask, q.dtype)]
    weights = torch.cat([*scores, *(2 * (q * k).sum(-1)[..., None] for k in keys[1:])], -1).softmax(
        -1
    )
    total = q.shape[2]
    mixed = weights[..., :total] @ values[0]
    return mixed + sum(weights[..., total + i, None] * v for i, v in enumerate(values[1:]))


def shifted(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    return joined(q, keys, values, mask.roll(1, 0))


def half_of_it(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Weights that do not add up to 1: some columns are left out."""
    parts = [q @ keys[0].mT + added(mask, q.dtype), *((q * k).sum(-1)[..., None] for k in keys)]
    total = q.shape[2]
    return torch.cat(parts, -1).softmax(-1)[..., :total] @ values[0]


def a_learned_column(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Sinks; the column's length is read off the scores, as a number of the graph."""
    scores = q @ keys[0].mT + added(mask, q.dtype)
    sink = q.new_ones(HEADS).view(1, HEADS, 1, 1).expand(1, HEADS, scores.shape[2], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ values[0]


WRONG = {
    "a learned column": (a_learned_column, 1, "joins scores with something else"),
    "sizes": (of_sizes, 1, "differs: the result by"),
    "two scales": (two_scales, 2, "not all multiplied with one number"),
    "shifted": (shifted, 1, "another form than branch_attention's"),
    "half of it": (half_of_it, 1, "joined differently"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("sizes", "a learned column") else pytest.mark.slow)
        for n in WRONG
    ],
)
def test_another_computation_is_refused_with_its_line(name: str) -> None:
    attend, steps, message = WRONG[name]
    with pytest.raises(PlanError, match=message) as caught:
        lower(target(), written(attend, steps=steps), Plan(cp=2, verify=False))
    assert "written_drafts.py:" in str(caught.value) or "test_written_attention.py:" in str(
        caught.value
    )
    assert "write sc.branch_attention(" in str(caught.value)

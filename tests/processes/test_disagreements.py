"""One rank differs from the others, in its plan, models, batch, arguments or loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spec_compile as sc
from tests.models import gated_draft, packed_batch, tiny_llama, window_draft
from tests.ranks import run_processes

from .prepared import (
    TIMEOUT_S,
    Prepared,
    Story,
    assert_ended,
    batch_of,
    good_step,
    oracle,
    owned_grads,
    play,
    policy_loss,
    prepare,
)

pytestmark = pytest.mark.dist

PLAN = sc.Plan(cp=2, pp=2, micro_batches=2, timeout_s=TIMEOUT_S, verify=False)


@pytest.fixture(scope="module")
def pipeline() -> Prepared:
    return prepare(PLAN)


def prepared(plan: sc.Plan, target: Any, draft: nn.Module | None) -> Prepared:
    return Prepared(target, draft, plan, sc.lower(target, draft, plan))


def odd_ones(pipeline: Prepared) -> dict[str, Callable[[], Prepared]]:
    """What the odd rank brings, instead of what the others have."""

    def target(**options: Any) -> Any:
        return tiny_llama(dtype=torch.float32, **options)

    def planned(**changes: Any) -> Prepared:
        return dataclasses.replace(pipeline, plan=dataclasses.replace(PLAN, **changes))

    partly_frozen = copy.deepcopy(pipeline.target)
    partly_frozen.model.norm.weight.requires_grad_(False)
    return {
        "flags": lambda: dataclasses.replace(pipeline, target=partly_frozen),
        "micro_batches": lambda: planned(micro_batches=3),
        "axes": lambda: planned(dp=2, pp=1),
        "timeout": lambda: planned(timeout_s=2 * TIMEOUT_S),
        "taps": lambda: prepared(PLAN, t := target(), gated_draft(t, taps=(3, 1, 3))),
        "steps": lambda: prepared(PLAN, t := target(), gated_draft(t, steps=2)),
        "draft": lambda: prepared(PLAN, t := target(), window_draft(t)),
        "no draft": lambda: prepared(PLAN, target(), None),
        "target": lambda: prepared(PLAN, t := target(hidden=40), gated_draft(t)),
        "layers": lambda: prepared(PLAN, t := target(layers=5), gated_draft(t)),
        "weights": lambda: prepared(PLAN, t := target(seed=1), gated_draft(t)),
        "vocabulary": lambda: prepared(PLAN, t := target(vocab=54), gated_draft(t)),
    }


@pytest.mark.parametrize(
    "differing",
    [
        ("micro_batches", "axes", "timeout", "taps", "weights"),
        pytest.param(
            ("flags", "steps", "draft", "no draft", "target", "layers", "vocabulary"),
            marks=[pytest.mark.slow, pytest.mark.timeout(300)],
        ),
    ],
    ids=["plans", "models"],
)
def test_a_rank_with_another_plan_or_model_ends_parallelize_on_all_and_the_next_one_works(
    pipeline: Prepared, differing: tuple[str, ...]
) -> None:
    makers = odd_ones(pipeline)
    others = {name: makers[name]() for name in differing}
    expected = oracle(pipeline)

    def body(rank: int) -> list[str]:
        problems = []
        for number, (name, other) in enumerate(others.items()):
            odd = number % 4
            try:
                (other if rank == odd else pipeline).parallelize()
                problems.append(f"{name}: rank {rank} was bound")
            except sc.PlanError as error:
                if rank != odd and not names(str(error), odd):
                    problems.append(f"{name}: rank {rank} does not name rank {odd}: {error}")
        model = pipeline.parallelize()
        good_step(model, expected)
        return problems

    assert run_processes(4, body, timeout=30.0 * len(differing)) == [[], [], [], []]


def names(message: str, rank: int) -> bool:
    """The message speaks of this rank."""
    return any(f"{word} {rank}" in message for word in ("rank", "ranks", "and"))


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_that_cannot_lower_raises_its_own_error_and_the_others_a_plan_error(
    pipeline: Prepared, odd: int
) -> None:
    draft = gated_draft(pipeline.target)
    draft.add_module("noise", nn.Dropout(0.5))

    def before(rank: int) -> None:
        return None

    def fault(rank: int, _: None) -> None:
        if rank == odd:
            sc.parallelize(pipeline.target, draft, PLAN)
        pipeline.parallelize()

    for rank, end in enumerate(play(Story(before, fault))):
        kind = sc.ConfigError if rank == odd else sc.PlanError
        assert_ended(end, kind, "dropout" if rank == odd else f"rank {odd}")


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_without_a_plan_raises_its_own_error_and_the_others_a_plan_error(
    pipeline: Prepared, odd: int
) -> None:
    def before(rank: int) -> None:
        return None

    def fault(rank: int, _: None) -> None:
        if rank == odd:
            sc.parallelize(pipeline.target, pipeline.draft, None)  # type: ignore[arg-type]
        pipeline.parallelize()

    for rank, end in enumerate(play(Story(before, fault))):
        kind = sc.ConfigError if rank == odd else sc.PlanError
        assert_ended(end, kind, "must be a Plan" if rank == odd else f"rank {odd}")


def test_a_plan_for_another_number_of_ranks_is_a_plan_error_on_all(pipeline: Prepared) -> None:
    def body(rank: int) -> None:
        for plan in (sc.Plan(cp=2), sc.Plan(), sc.Plan(cp=8)):
            with pytest.raises(sc.PlanError, match="4 were started"):
                sc.parallelize(pipeline.target, pipeline.draft, plan)
        plan = sc.Plan(cp=2) if rank == 1 else PLAN
        with pytest.raises(sc.PlanError, match="4 were started" if rank == 1 else "rank 1"):
            dataclasses.replace(pipeline, plan=plan).parallelize()

    run_processes(4, body)


def test_a_rank_whose_shared_memory_fails_ends_parallelize_on_all_and_keeps_the_weights(
    pipeline: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_compile.runtime.shared_memory import SharedMemory

    def refuse(self: SharedMemory, edge: Any, layout: Any, handle: Any) -> Any:
        raise sc.ChannelError("no room in shared memory")

    def body(rank: int) -> None:
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(SharedMemory, "accept", refuse)
            with pytest.raises(sc.ChannelError, match="no room in shared memory"):
                pipeline.parallelize()
        assert not any(p.is_meta for p in pipeline.target.parameters())
        pipeline.parallelize().logprobs(batch_of(0))

    run_processes(4, body)


GOOD = batch_of(0)


def spoiled(**changes: Any) -> sc.PackedBatch:
    return dataclasses.replace(GOOD, **changes)


def with_token(value: int) -> Tensor:
    tokens = GOOD.tokens.clone()
    tokens[5] = value
    return tokens


ADVANTAGES = GOOD.fields["advantages"]
MALFORMED: dict[str, Any] = {
    "no batch": None,
    "a dict": {"tokens": GOOD.tokens},
    "tokens are a list": spoiled(tokens=GOOD.tokens.tolist()),
    "tokens are int32": spoiled(tokens=GOOD.tokens.int()),
    "tokens are padded": spoiled(tokens=GOOD.tokens[None]),
    "a token is outside the vocabulary": spoiled(tokens=with_token(53)),
    "a token is negative": spoiled(tokens=with_token(-1)),
    "offsets do not start at 0": spoiled(cu_seqlens=torch.tensor([1, 67])),
    "offsets do not end at T": spoiled(cu_seqlens=torch.tensor([0, 66])),
    "offsets decrease": spoiled(cu_seqlens=torch.tensor([0, 9, 5, 67])),
    "offsets are floats": spoiled(cu_seqlens=torch.tensor([0.0, 67.0])),
    "offsets are empty": spoiled(cu_seqlens=torch.zeros(0, dtype=torch.int64)),
    "the mask is int64": spoiled(loss_mask=GOOD.loss_mask.long()),
    "the mask is short": spoiled(loss_mask=GOOD.loss_mask[:-1]),
    "the draft mask is short": spoiled(draft_mask=GOOD.loss_mask[:-1]),
    "fields are no mapping": spoiled(fields=[ADVANTAGES]),
    "a field is short": spoiled(fields={**GOOD.fields, "advantages": ADVANTAGES[:-1]}),
    "a field is no tensor": spoiled(fields={**GOOD.fields, "advantages": 1.0}),
    "anchors are outside": spoiled(anchors=torch.tensor([3, 67])),
    "anchors fall": spoiled(anchors=torch.tensor([7, 3])),
}
DIFFERENT: dict[str, Any] = {
    "tokens": spoiled(tokens=(GOOD.tokens + 1) % 53),
    "documents": spoiled(cu_seqlens=torch.tensor([0, 30, 67])),
    "mask": spoiled(loss_mask=~GOOD.loss_mask),
    "draft mask": spoiled(draft_mask=None),
    "field": spoiled(fields={**GOOD.fields, "advantages": ADVANTAGES + 1e-3}),
    "one field less": spoiled(fields={"advantages": ADVANTAGES}),
    "anchor seed": spoiled(anchor_seed=1),
    "shorter": packed_batch((5,), dtype=torch.float32),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "denominator": {"denominator": 7},
    "draft denominator": {"draft_denominator": [1.0]},
    "draft weight": {"draft_weight": 0.5},
    "no draft": {"train_draft": False},
    "no policy": {"policy_loss": None},
}
REFUSED: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature nan": {"temperature": float("nan")},
    "denominator inf": {"denominator": float("inf")},
    "denominator text": {"denominator": "7"},
    "draft denominator text": {"draft_denominator": "many"},
    "draft denominators": {"draft_denominator": [1.0, 2.0]},
    "no draft denominator": {"draft_denominator": []},
    "policy loss text": {"policy_loss": "loss"},
    "draft switch text": {"train_draft": "yes"},
}


def odd_calls() -> list[tuple[str, Any, dict[str, Any], type[Exception]]]:
    """Name, batch and arguments of the odd rank's call, and what it raises itself."""
    calls: list[tuple[str, Any, dict[str, Any], type[Exception]]] = []
    for name, batch in (*MALFORMED.items(), *DIFFERENT.items()):
        calls.append((name, batch, {}, sc.BatchError))
    calls += [(name, GOOD, changes, sc.BatchError) for name, changes in ARGUMENTS.items()]
    calls += [(name, GOOD, changes, sc.ConfigError) for name, changes in REFUSED.items()]
    return calls


def test_every_malformed_or_differing_step_is_refused_on_all_ranks_and_the_next_one_works(
    pipeline: Prepared,
) -> None:
    expected = oracle(pipeline)

    def body(rank: int) -> list[str]:
        model = pipeline.parallelize()
        problems = []
        for number, (name, batch, changes, kind) in enumerate(odd_calls()):
            odd = number % 4
            before = owned_grads(model)
            arguments: dict[str, Any] = {"batch": GOOD, "policy_loss": policy_loss}
            if rank == odd:
                arguments |= {"batch": batch, **changes}
            try:
                model.step(**arguments)
                problems.append(f"{name}: no error on rank {rank}, odd rank {odd}")
            except (sc.BatchError, sc.ConfigError) as error:
                if type(error) is not (kind if rank == odd else sc.BatchError):
                    problems.append(f"{name}: {error!r} on rank {rank}, odd rank {odd}")
                if rank != odd and not names(str(error), odd):
                    problems.append(f"{name}: rank {rank} does not name rank {odd}: {error}")
            after = owned_grads(model)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before), name
            if number % 4 == 3:
                good_step(model, expected)
        good_step(model, expected)
        return problems

    assert run_processes(4, body, timeout=110) == [[], [], [], []]


def test_ranks_that_make_different_calls_are_told_so(pipeline: Prepared) -> None:
    expected = oracle(pipeline)

    def body(rank: int) -> None:
        model = pipeline.parallelize()
        with pytest.raises(sc.BatchError, match=r"rank 2 called logprobs|rank 0 called step"):
            model.logprobs(GOOD) if rank == 2 else model.step(GOOD, policy_loss)
        with pytest.raises(sc.BatchError, match=r"packed batch|PackedBatch"):
            model.counts(None if rank == 1 else GOOD)  # type: ignore[arg-type]
        good_step(model, expected)

    run_processes(4, body)


def test_equal_arguments_of_other_types_are_no_difference(pipeline: Prepared) -> None:
    def body(rank: int) -> float:
        model = pipeline.parallelize()
        count = torch.tensor(30.0) if rank == 2 else 30
        return model.step(
            GOOD, policy_loss, denominator=[12, 12.0][rank % 2], draft_denominator=count
        ).draft_loss

    assert len(set(run_processes(4, body))) == 1


class LossError(Exception):
    """A class that other ranks may not know."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


def test_an_error_in_one_policy_loss_reaches_all_ranks_and_the_next_step_works(
    pipeline: Prepared,
) -> None:
    """Rank 3 alone raises; ranks 0 and 1 have no loss to call."""
    expected = oracle(pipeline)

    def raising(rank: int, error: BaseException) -> Callable[[sc.TokenOutputs], Any]:
        def broken_loss(rows: sc.TokenOutputs) -> Any:
            if rank == 3:
                raise error
            return policy_loss(rows)

        return broken_loss

    def body(rank: int) -> None:
        model = pipeline.parallelize()
        for error, kind in (
            (ValueError("bad advantage"), ValueError),
            (KeyError("weights"), KeyError),
            (sc.BatchError("bad fields"), sc.BatchError),
            (sc.ChannelError("reward server is gone"), sc.ChannelError),
            (LossError(7, "odd"), LossError if rank == 3 else sc.SpecCompileError),
        ):
            with pytest.raises(kind) as caught:
                model.step(GOOD, raising(rank, error))
            told = "".join(getattr(caught.value, "__notes__", [])) + str(caught.traceback[-1])
            assert "broken_loss" in told
            good_step(model, expected)

    run_processes(4, body)


@pytest.mark.parametrize("value", ["nan", "text", "vector", "none"])
def test_a_policy_loss_that_returns_no_finite_scalar_on_one_rank_is_refused_on_all(
    pipeline: Prepared, value: str
) -> None:
    def returned(rows: sc.TokenOutputs) -> Any:
        total = rows.logprobs.sum()
        return {"nan": total * float("nan"), "text": "0.0", "vector": rows.logprobs}.get(value)

    def body(rank: int) -> None:
        model = pipeline.parallelize()
        with pytest.raises(sc.ConfigError, match="policy_loss"):
            model.step(GOOD, returned if rank == 2 else policy_loss)
        model.step(GOOD, policy_loss)

    run_processes(4, body)


def test_gradients_of_earlier_steps_survive_a_failed_one(pipeline: Prepared) -> None:
    def broken(rows: sc.TokenOutputs) -> Any:
        raise RuntimeError("broken")

    def body(rank: int) -> None:
        model = pipeline.parallelize()
        model.step(GOOD, policy_loss)
        before = copy.deepcopy(owned_grads(model))
        with pytest.raises(RuntimeError, match="broken"):
            model.step(GOOD, broken)
        after = owned_grads(model)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_processes(4, body)

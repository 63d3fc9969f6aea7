"""Wrong arguments of a call: the same kind of error on every rank, and then a good step."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spec_compile import ParallelModel, Plan
from spec_compile.errors import BatchError, ConfigError

from .oracle import dense_step
from .step_cases import (
    assert_gradients,
    batches,
    bound,
    clipped,
    gradients_of,
    joined,
    models,
)
from .step_refusals import INF, NAN, PIPELINE, REPLICAS, refused

BAD_ARGUMENTS: dict[str, list[Any]] = {
    "temperature": [None, "1", True, 0, -1.0, NAN, INF, torch.ones(3), 10**400, [1.0]],
    "denominator": ["7", True, -1, NAN, INF, torch.ones(2), [3], 0],
    "draft_weight": ["1", True, NAN, -INF, torch.ones(2), [1.0]],
    "draft_denominator": ["many", True, -1, NAN, INF, [], [1, 2], [[1.0]], {}, ["1"], 1j, object(), 0],
    "train_draft": [None, 1, 0, "yes", torch.tensor(True), np.bool_(True)],
    "policy_loss": [3, "loss", torch.ones(()), [clipped]],
}  # fmt: skip


def test_every_bad_argument_is_a_config_error_on_every_rank_and_the_next_step_works() -> None:
    batch = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), batch, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        for name, values in BAD_ARGUMENTS.items():
            for value in values:
                arguments = {"policy_loss": clipped, name: value}
                refused(model, lambda a=arguments: model.step(batch, **a), ConfigError, name)  # type: ignore[misc]
        for temperature in BAD_ARGUMENTS["temperature"]:
            for call in (model.logprobs,) if model.plan.pp > 1 else (model.logprobs, model):
                refused(model, lambda c=call, t=temperature: c(batch, temperature=t), ConfigError, "temperature")  # type: ignore[misc] # fmt: skip
        model.step(batch, clipped)
        return gradients_of(model)

    assert_gradients(bound("llama", "gated", PIPELINE, body), joined(wanted))


def test_a_bad_argument_of_one_rank_is_heard_on_all() -> None:
    batch = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        for value in ("many", [1, 2], object(), {"a": 1}):
            given = value if rank == 2 else None
            kind, match = (
                (ConfigError, "draft_denominator") if rank == 2 else (BatchError, "rank 2")
            )
            refused(
                model,
                lambda g=given: model.step(batch, clipped, draft_denominator=g),  # type: ignore[misc]
                kind,
                match,
            )
        assert model.step(batch, clipped).draft_loss > 0

    bound("llama", "gated", PIPELINE, body)


def test_the_denominators_of_a_vector_draft_are_one_a_step_or_one_for_all() -> None:
    batch = batches(1)[0]
    good: list[Any] = [[9.0, 4.5], torch.tensor([9.0, 4.5]), np.array([9.0, 4.5]), (9, 4.5)]
    wanted = dense_step(*models("llama", "window"), batch, clipped, draft_denominator=[9.0, 4.5])
    single = dense_step(*models("llama", "window"), batch, clipped, draft_denominator=7.0)

    def body(model: ParallelModel, rank: int) -> None:
        for bad in ([], [3.0], [3.0, 3.0, 3.0], [NAN, 1.0], [3.0, 0.0], [-1.0, 1.0]):
            refused(
                model,
                lambda b=bad: model.step(batch, clipped, draft_denominator=b),  # type: ignore[misc]
                ConfigError,
                "draft_denominator",
            )
        for value in good:
            result = model.step(batch, clipped, draft_denominator=value)
            assert abs(result.draft_loss - wanted.draft_loss) < 1e-10
        result = model.step(batch, clipped, draft_denominator=7)
        assert abs(result.draft_loss - single.draft_loss) < 1e-10

    bound("llama", "window", REPLICAS, body)


def test_numbers_of_every_numeric_kind_mean_the_same() -> None:
    batch = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        eights: list[Any] = [8, 8.0, np.float32(8), np.int64(8), fractions.Fraction(8)]
        losses = {model.step(batch, clipped, denominator=eight).policy_loss for eight in eights}
        assert len(losses) == 1

    bound("llama", "gated", PIPELINE, body)


def test_zero_denominators_are_fine_where_there_is_nothing_to_divide() -> None:
    batch = batches(1)[0]
    batch.loss_mask = torch.zeros_like(batch.loss_mask)

    def body(model: ParallelModel, rank: int) -> None:
        policy, draft = model.counts(batch)
        result = model.step(batch, clipped, denominator=policy, draft_denominator=draft)
        assert (result.policy_loss, result.draft_loss) == (0.0, 0.0)

    bound("llama", "window", REPLICAS, body)


NO_BATCHES: list[Any] = [None, 5, "batch", b"x", {}, {"a": 1}, iter(()), [None], [1, 2]]


def test_what_is_no_batch_is_a_batch_error_in_every_call() -> None:
    good = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        calls: list[Callable[[Any], object]] = [
            lambda b: model.step(b, clipped), model.logprobs, model.evaluate, model.counts,
        ]  # fmt: skip
        for call in calls:
            for given in NO_BATCHES:
                refused(model, lambda c=call, g=given: c(g), BatchError, "PackedBatch")  # type: ignore[misc]
        model.step(good, clipped)

    bound("llama", "gated", PIPELINE, body)


def test_counts_are_ints_where_integral_and_zeros_for_no_batches() -> None:
    given = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> tuple[Any, Any]:
        return model.counts([]), model.counts([given, given])

    for draft, nothing in (("gated", 0), ("window", [0, 0]), ("none", 0)):
        for none, two in bound("llama", draft, REPLICAS, body):
            assert none == (0, nothing)
            listed = two[1] if isinstance(two[1], list) else [two[1]]
            assert all(type(one) is int for one in (two[0], *listed))


def test_a_step_on_gradients_that_are_not_summed_yet_is_refused() -> None:
    given = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), given, clipped)
    tokens = int(wanted.policy_count)

    def body(model: ParallelModel, rank: int) -> Any:
        model.step(given, clipped)
        model(given)  # no backward: nothing is pending
        model.step(given, clipped)
        rows = model(given)
        assert rows.draft_loss is not None
        (clipped(rows)[0] / tokens + rows.draft_loss).backward()
        for loss in (clipped, None):
            refused(model, lambda f=loss: model.step(given, f), ConfigError, "finalize_grads")  # type: ignore[misc]
        refused(model, model.clip_grad_norm_, ConfigError, "finalize_grads")
        assert model.logprobs(given) is not None
        assert model.state_dict()["step"] == 2
        model(given)
        model.finalize_grads()
        model.step(given, clipped)
        model.clip_grad_norm_()
        return gradients_of(model)

    found = bound("llama", "gated", REPLICAS, body)
    assert_gradients(found, joined(wanted), factor=4.0)


def test_pending_gradients_of_one_rank_are_heard_on_all() -> None:
    given = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        rows = model(given)
        if rank == 1:
            assert rows.draft_loss is not None
            rows.draft_loss.backward()
        kind, match = (ConfigError, "finalize_grads") if rank == 1 else (BatchError, "rank 1")
        refused(model, lambda: model.step(given, clipped), kind, match)
        refused(model, model.clip_grad_norm_, ConfigError, "finalize_grads")
        model.finalize_grads()
        model.step(given, clipped)

    # ranks of two replicas: the backward of one needs nothing of the other
    bound("llama", "gated", Plan(dp=2), body)


def test_finalize_grads_sums_gradients_that_only_one_replica_has() -> None:
    given = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), given, None).draft_grads

    def body(model: ParallelModel, rank: int) -> Any:
        with pytest.raises(ConfigError, match="no new gradients"):
            model.finalize_grads()
        rows = model(given)
        if rank == 1:
            assert rows.draft_loss is not None
            (rows.draft_loss * 2).backward()  # a replica's share is half of the rows
        model.finalize_grads()
        return {n: g for n, g in gradients_of(model).items() if n.startswith("draft.")}

    found = bound("llama", "gated", Plan(dp=2), body)
    assert_gradients(found, {f"draft.{name}": grad for name, grad in wanted.items()})


def test_draft_loss_of_rows_is_unweighted_in_value_and_gradient() -> None:
    given = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), given, None, draft_weight=1.0)

    def body(model: ParallelModel, rank: int) -> Any:
        rows = model(given)
        assert rows.draft_loss is not None
        assert abs(float(rows.draft_loss.detach()) - wanted.draft_loss) < 1e-10
        rows.draft_loss.backward()
        model.finalize_grads()
        return {n: g for n, g in gradients_of(model).items() if n.startswith("draft.")}

    plan = Plan(cp=2, micro_batches=2, draft_weight=5.0)
    expected = {f"draft.{name}": grad for name, grad in wanted.draft_grads.items()}
    assert_gradients(bound("llama", "gated", plan, body), expected)


BAD_LIMITS = [0, 0.0, -1.0, NAN, -INF, True, "1", torch.tensor(1.0), [1.0], 1j, 10**400]


def test_bad_clip_limits_are_refused_on_every_rank_and_change_nothing() -> None:
    given = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        model.step(given, clipped)
        norms = model.clip_grad_norm_(policy=INF, draft=INF)
        for bad in BAD_LIMITS:
            for group in ("policy", "draft"):
                refused(model, lambda g=group, b=bad: model.clip_grad_norm_(**{g: b}), ConfigError, group)  # type: ignore[misc] # fmt: skip
                odd = bad if rank == 3 else 1.0
                match = group if rank == 3 else "rank 3"
                refused(model, lambda g=group, o=odd: model.clip_grad_norm_(**{g: o}), ConfigError, match)  # type: ignore[misc] # fmt: skip
        refused(model, lambda: model.clip_grad_norm_(draft=1.0 + rank), ConfigError, "same norms")
        refused(
            model, lambda: model.clip_grad_norm_(policy=None if rank else 1), ConfigError, "same"
        )
        assert model.clip_grad_norm_(policy=norms["policy"] / 2, draft=np.float32(0.5)) == norms  # type: ignore[arg-type]
        assert model.clip_grad_norm_()["policy"] == pytest.approx(norms["policy"] / 2)

    bound("llama", "gated", PIPELINE, body)


def test_ranks_that_make_different_calls_are_told_so_and_go_on() -> None:
    given = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        calls: list[Callable[[], object]] = [
            lambda: model.step(given, clipped), model.clip_grad_norm_, model.finalize_grads,
            lambda: model.counts(given),
        ]  # fmt: skip
        for first, second in ((0, 1), (1, 2), (3, 1), (2, 0)):
            refused(model, calls[first if rank else second], (BatchError, ConfigError), "called")
        model.step(given, clipped)

    bound("llama", "gated", PIPELINE, body)

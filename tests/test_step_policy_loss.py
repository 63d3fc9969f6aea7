"""Wrong policy losses: the same kind of error on every rank, and then a good step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan
from spec_compile.contract import TokenOutputs
from spec_compile.errors import ConfigError

from .models import packed_batch
from .oracle import dense_step
from .step_cases import (
    VOCAB,
    assert_gradients,
    batches,
    bound,
    clipped,
    gradients_of,
    joined,
    models,
)
from .step_refusals import INF, NAN, PIPELINE, refused


def constant(rows: TokenOutputs) -> Tensor:
    return torch.tensor(1.0, dtype=torch.float64)


BAD_LOSSES: dict[str, tuple[Callable[[TokenOutputs], Any], str]] = {
    "None": (lambda rows: None, "found NoneType as the loss"),
    "a float": (lambda rows: 1.5, "found float as the loss"),
    "a list": (lambda rows: [rows.logprobs.sum(), {}], "found list as the loss"),
    "a vector": (lambda rows: rows.logprobs + 1, "found a loss of shape"),
    "a triple": (lambda rows: (rows.logprobs.sum(), {}, {}), "found a tuple of 3"),
    "a single": (lambda rows: (rows.logprobs.sum(),), "found a tuple of 1"),
    "named None": (lambda rows: (rows.logprobs.sum(), None), "found NoneType as the named"),
    "named list": (lambda rows: (rows.logprobs.sum(), [1.0]), "found list as the named"),
    "nan": (lambda rows: rows.logprobs.sum() * NAN, "returned nan"),
    "infinite": (lambda rows: rows.logprobs.sum() + INF, "returned inf"),
    "a constant": (constant, "does not depend on rows"),
    "detached": (lambda rows: rows.logprobs.detach().sum(), "does not depend on rows"),
    "of other weights": (
        lambda rows: torch.ones(3, requires_grad=True).sum(),
        "does not depend on rows",
    ),
    "a named vector": (lambda rows: (rows.logprobs.sum(), {"r": torch.ones(3)}), "'r' must be a scalar"),
    "a named nan": (lambda rows: (rows.logprobs.sum(), {"r": NAN}), "'r' must be finite"),
    "a named infinity": (lambda rows: (rows.logprobs.sum(), {"r": INF}), "'r' must be finite"),
    "a wrong extreme": (lambda rows: (rows.logprobs.sum(), {"r/max": INF}), "'r/max' must be finite"),
    "a named text": (lambda rows: (rows.logprobs.sum(), {"r": "1"}), "found str"),
    "a name that is none": (lambda rows: (rows.logprobs.sum(), {3: 1.0}), "names of sums must be str"),
    "an own key": (lambda rows: (rows.logprobs.sum(), {"step/x": 1.0}), "'step/' are the library's"),
}  # fmt: skip


def test_every_wrong_policy_loss_is_a_config_error_on_every_rank_and_the_next_step_works() -> None:
    given = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), given, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        for loss, match in BAD_LOSSES.values():
            refused(model, lambda f=loss: model.step(given, f), ConfigError, match)  # type: ignore[misc]
        model.step(given, clipped)
        return gradients_of(model)

    assert_gradients(bound("llama", "gated", PIPELINE, body), joined(wanted))


def test_extremes_of_no_rows_may_be_infinite_and_names_may_be_missing() -> None:
    given = batches(1)[0]

    def loss(rows: TokenOutputs) -> Any:
        seen = rows.logprobs.detach()[rows.mask]
        named = {"low/min": torch.cat([seen, seen.new_full((1,), INF)]).min(), "one": 1}
        if len(seen):
            named["high/max"] = seen.max()
        return rows.logprobs.sum(), named

    def body(model: ParallelModel, rank: int) -> dict[str, float]:
        return model.step(given, loss, denominator=1).metrics

    plan = Plan(cp=2, pp=2, micro_batches=9)
    for metrics in bound("llama", "gated", plan, body):
        assert metrics["low/min"] < metrics["high/max"] < 0
        assert metrics["one"] == 9


@pytest.mark.parametrize(
    ("lengths", "number"), [((7, 3), 1), ((7, 3), 5), ((), 3), ((0, 1, 1), 4), ((4, 0, 9), 2)]
)
def test_the_policy_loss_is_called_once_a_micro_batch_also_where_it_is_empty(
    lengths: tuple[int, ...], number: int
) -> None:
    given = packed_batch(lengths, vocab=VOCAB)

    def body(model: ParallelModel, rank: int) -> list[int]:
        seen: list[int] = []

        def counting(rows: TokenOutputs) -> Tensor:
            seen.append(len(rows.tokens))
            assert rows.fields["advantages"].shape == rows.mask.shape == rows.logprobs.shape
            assert int(rows.cu_seqlens[-1]) == len(rows.tokens)
            return (rows.logprobs * rows.mask).sum()

        model.step(given, counting)
        return seen

    found = bound("llama", "gated", Plan(cp=2, pp=2, micro_batches=number), body)
    assert found[0] == found[1] == []
    assert found[2] == found[3]
    assert len(found[2]) == number
    assert sum(found[2]) == sum(lengths)


def test_an_error_in_the_loss_of_an_empty_micro_batch_reaches_every_rank() -> None:
    given = packed_batch((7,), vocab=VOCAB)

    def body(model: ParallelModel, rank: int) -> None:
        refused(
            model, lambda: model.step(given, lambda rows: rows.logprobs.max()), RuntimeError, "max"
        )
        model.step(given, clipped)

    bound("llama", "gated", PIPELINE, body)


@pytest.mark.parametrize("plan", [PIPELINE, Plan(cp=2, dp=2)])
def test_a_policy_loss_that_differs_on_cp_peers_is_refused_on_every_rank(plan: Plan) -> None:
    given = batches(plan.dp)

    def body(model: ParallelModel, rank: int) -> None:
        batch = given[model.dp_rank]

        def odd(rows: TokenOutputs) -> Tensor:
            return (rows.logprobs * rows.mask).sum() * (1.01 if rank == 3 else 1.0)

        refused(model, lambda: model.step(batch, odd), ConfigError, "rank 2 .* on rank 3")
        model.step(batch, clipped)

    bound("llama", "gated", plan, body)

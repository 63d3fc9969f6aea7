"""Wrong arguments and surroundings of a call: the same kind of error on every rank, and then a good step."""

from __future__ import annotations

import copy
import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan, StepResult
from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.errors import BatchError, ConfigError

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

PIPELINE = Plan(cp=2, pp=2, micro_batches=2)
REPLICAS = Plan(cp=2, micro_batches=2)
NAN, INF = float("nan"), float("inf")


def assert_all_equal(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        match = other[name]
        assert (grad is None) == (match is None), name
        assert grad is None or (match is not None and torch.equal(grad, match)), name


def refused(
    model: ParallelModel,
    call: Callable[[], object],
    kind: type[Exception] | tuple[type[Exception], ...],
    match: str,
) -> None:
    """The call raises, and no gradient has changed."""
    before = gradients_of(model)
    with pytest.raises(kind, match=match):
        call()
    assert_all_equal(gradients_of(model), before)


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


def run_step(model: ParallelModel, batch: PackedBatch) -> tuple[StepResult, Any]:
    for group in model.param_groups():
        for parameter in group["params"]:
            parameter.grad = None
    return model.step(batch, clipped), gradients_of(model)


@pytest.mark.parametrize("surrounding", ["autocast", "no_grad"])
def test_a_step_is_the_same_step_under_autocast_and_no_grad(surrounding: str) -> None:
    given = packed_batch((5, 9, 1), vocab=VOCAB, dtype=torch.float32)

    def body(model: ParallelModel, rank: int) -> None:
        plain, grads = run_step(model, given)
        logprobs, measured = model.logprobs(given), model.evaluate(given)
        made: dict[str, Callable[[], Any]] = {
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            "no_grad": torch.no_grad,
        }
        with made[surrounding]():
            again, same = run_step(model, given)
            assert torch.equal(model.logprobs(given), logprobs)
            assert model.evaluate(given) == measured
            assert model.counts(given) is not None
        assert again == plain
        assert_all_equal(same, grads)

    bound("llama_float32", "gated", PIPELINE, body)


def test_own_loops_keep_their_precision_under_autocast_and_record_nothing_under_no_grad() -> None:
    given = packed_batch((5, 9, 1), vocab=VOCAB, dtype=torch.float32)

    def body(model: ParallelModel, rank: int) -> None:
        plain = model(given)
        with torch.autocast("cpu", torch.bfloat16):
            inside = model(given)
        assert torch.equal(plain.logprobs, inside.logprobs)
        assert torch.equal(plain.draft_loss, inside.draft_loss)  # type: ignore[arg-type]
        with torch.no_grad():
            still = model(given)
        assert torch.equal(plain.logprobs, still.logprobs)
        assert not still.logprobs.requires_grad
        assert still.draft_loss is not None
        assert not still.draft_loss.requires_grad
        with torch.set_grad_enabled(rank == 0):
            refused(model, lambda: model(given), BatchError, "same arguments")

    bound("llama_float32", "gated", REPLICAS, body)


def test_inference_mode_is_refused_where_gradients_are_made_and_fine_elsewhere() -> None:
    given = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), given, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        with torch.inference_mode():
            refused(model, lambda: model.step(given, clipped), ConfigError, "inference_mode")
            refused(model, lambda: model(given), ConfigError, "inference_mode")
            logprobs = model.logprobs(given)
            model.evaluate(given)
            model.counts(given)
        assert not logprobs.is_inference()
        with torch.inference_mode(rank == 0):
            kind, match = (ConfigError, "inference_mode") if rank == 0 else (BatchError, "rank 0")
            refused(model, lambda: model.step(given, clipped), kind, match)
        model.step(given, clipped)
        with torch.inference_mode():
            model.clip_grad_norm_(policy=1e9)
        assert torch.equal(model.logprobs(given), logprobs)
        return gradients_of(model)

    assert_gradients(bound("llama", "gated", REPLICAS, body), joined(wanted))


def test_batches_made_under_inference_mode_train() -> None:
    with torch.inference_mode():
        given = packed_batch((7, 3), vocab=VOCAB)
        fields = {name: value * 1.0 for name, value in given.fields.items()}
        given = PackedBatch(given.tokens * 1, given.cu_seqlens, given.loss_mask, fields)
    assert given.fields["advantages"].is_inference()

    def body(model: ParallelModel, rank: int) -> None:
        model.step(given, clipped)
        clipped(model(given))[0].backward()
        model.finalize_grads()

    bound("llama", "gated", REPLICAS, body)


def closed_calls(model: ParallelModel) -> dict[str, Callable[[], object]]:
    given = batches(1)[0]
    return {
        "step": lambda: model.step(given, clipped),
        "logprobs": lambda: model.logprobs(given),
        "evaluate": lambda: model.evaluate(given),
        "forward": lambda: model(given),
        "counts": lambda: model.counts(given),
        "finalize_grads": model.finalize_grads,
        "clip_grad_norm_": model.clip_grad_norm_,
        "param_groups": model.param_groups,
        "export_weights": lambda: list(model.export_weights("policy")),
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict({}),
    }


@pytest.mark.parametrize(("draft", "plan"), [("gated", PIPELINE), ("none", PIPELINE)])
def test_every_call_after_close_says_that_the_model_is_closed(draft: str, plan: Plan) -> None:
    def body(model: ParallelModel, rank: int) -> None:
        model.close()
        for name, call in closed_calls(model).items():
            with pytest.raises(ConfigError, match="this model was closed") as caught:
                call()
            assert type(caught.value) is ConfigError, name
        model.close()

    bound("llama", draft, plan, body)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    def body(model: ParallelModel, rank: int) -> None:
        state = model.state_dict()
        name = next(n for n in state if n.startswith("policy."))
        wrong: list[tuple[Any, str]] = [
            ({n: v for n, v in state.items() if n != name}, rf"lacks '{name}'"),
            ({n: v for n, v in state.items() if n != "step"}, "lacks 'step'"),
            ({n: v for n, v in state.items() if n != "random_state"}, "lacks 'random_state'"),
            ({**state, "policy.extra": torch.ones(1)}, r"unknown entries 'policy\.extra'"),
            ({**state, "rng.0": state["random_state"]}, r"unknown entries 'rng\.0'"),
            ({**state, name: torch.ones(2, 2, 2)}, rf"'{name}' is \(2, 2, 2\)"),
            ({**state, name: [1.0]}, rf"'{name}' is list"),
            ({**state, "step": 3}, "'step' is int"),
            ([1, 2], "needs a mapping"),
            (None, "needs a mapping"),
        ]
        changed = {n: v + 1 if n.startswith("policy.") else v for n, v in state.items()}
        before = {n: copy.deepcopy(v) for n, v in state.items()}
        for bad, match in wrong:
            spoiled = {**changed, **bad} if isinstance(bad, dict) else bad
            for gone in set(state) - set(bad) if isinstance(bad, dict) else ():
                del spoiled[gone]
            with pytest.raises(ConfigError, match=match):
                model.load_state_dict(spoiled)
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key]), key

    bound("llama", "gated", PIPELINE, body)


def test_the_checkpoint_of_one_rank_loads_on_four_and_back() -> None:
    (whole,) = bound(
        "llama", "gated", Plan(), lambda model, rank: copy.deepcopy(model.state_dict())
    )
    shifted = {n: v + 1 if v.is_floating_point() else v for n, v in whole.items()}

    def body(model: ParallelModel, rank: int) -> Any:
        model.load_state_dict(shifted)
        state = copy.deepcopy(model.state_dict())
        assert state.keys() <= shifted.keys()
        return state

    merged: dict[str, Tensor] = {}
    for state in bound("llama", "gated", PIPELINE, body):
        merged |= state
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], shifted[name]) for name in merged)
    bound("llama", "gated", Plan(), lambda model, rank: model.load_state_dict(merged))


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

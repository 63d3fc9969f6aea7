"""A call under autocast, no_grad or inference mode, after close, and with checkpoints that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan, StepResult
from spec_compile.batch import PackedBatch
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
from .step_refusals import PIPELINE, REPLICAS, assert_all_equal, refused


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

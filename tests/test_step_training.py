"""Steps in a training loop: accumulation, loops that own the loss, clipping, weights, several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import ParallelModel, Plan
from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.errors import BatchError, ConfigError

from .models import packed_batch, randomise
from .oracle import dense_step
from .parallel import run_models
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

EIGHT = Plan(cp=2, pp=2, dp=2, micro_batches=2)
HALVES = ((5, 9), (1, 17, 2))


def test_steps_add_up_without_rescaling() -> None:
    batch = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), batch, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        for _ in range(3):
            model.step(batch, clipped)
        return gradients_of(model)

    plan = Plan(cp=2, pp=2, micro_batches=2)
    assert_gradients(bound("llama", "gated", plan, body), joined(wanted), factor=3.0)


@pytest.mark.parametrize("draft", ["gated", "window"])
def test_two_half_batches_with_counts_give_the_gradient_of_one(draft: str) -> None:
    halves = [
        [packed_batch(h, vocab=VOCAB, seed=2 * dp + i) for i, h in enumerate(HALVES)]
        for dp in (0, 1)
    ]
    wanted = dense_step(*models("llama", draft), [b for rank in halves for b in rank], clipped)
    count = wanted.draft_count
    assert count is not None

    def body(model: ParallelModel, rank: int) -> Any:
        mine = halves[model.dp_rank]
        policy, drafted = model.counts(mine)
        assert policy == wanted.policy_count
        assert torch.equal(torch.as_tensor(drafted).double(), count)
        policy_loss = draft_loss = 0.0
        for half in mine:
            result = model.step(half, clipped, denominator=policy, draft_denominator=drafted)
            policy_loss += result.policy_loss
            draft_loss += result.draft_loss
        assert abs(policy_loss - wanted.policy_loss) < 1e-10
        assert abs(draft_loss - wanted.draft_loss) < 1e-10
        return gradients_of(model)

    assert_gradients(bound("llama", draft, EIGHT, body), joined(wanted))


def test_denominators_weight_temperature_and_draft_mask_equal_the_dense_ones() -> None:
    batch = batches(1, draft_mask=True)[0]
    options: dict[str, Any] = dict(
        denominator=17, draft_denominator=9.5, draft_weight=0.3, temperature=0.8
    )
    wanted = dense_step(*models("llama", "gated"), batch, clipped, **options)

    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(batch, clipped, **options)
        assert abs(result.policy_loss - wanted.policy_loss) < 1e-10
        assert abs(result.draft_loss - wanted.draft_loss) < 1e-10
        for name, value in wanted.metrics.items():
            assert abs(result.metrics[name] - value) < 1e-9, name
        return gradients_of(model)

    plan = Plan(cp=2, pp=2, micro_batches=2, draft_weight=2.0)
    assert_gradients(bound("llama", "gated", plan, body), joined(wanted))


def own_loop(model: ParallelModel, batch: PackedBatch, tokens: int, zero_between: bool) -> None:
    rows = model(batch)
    if zero_between:
        model.target.zero_grad()
        assert model.draft is not None
        model.draft.zero_grad()
    assert rows.draft_loss is not None
    (clipped(rows)[0] / tokens + 0.3 * rows.draft_loss).backward()


@pytest.mark.parametrize(
    ("cp", "dp", "zero_between"), [(1, 1, True), (1, 2, False), (2, 1, True), (2, 2, False)]
)
def test_a_loop_that_owns_the_loss_gets_the_gradients_of_step(
    cp: int, dp: int, zero_between: bool
) -> None:
    given = batches(dp)
    wanted = dense_step(*models("llama", "gated"), given, clipped, draft_weight=0.3)
    tokens = int(wanted.policy_count)

    def body(model: ParallelModel, rank: int) -> Any:
        own_loop(model, given[model.dp_rank], tokens, zero_between)
        with pytest.raises(ConfigError, match="finalize_grads"):
            model.clip_grad_norm_()
        model.finalize_grads()
        return gradients_of(model)

    plan = Plan(cp=cp, dp=dp, micro_batches=2)
    assert_gradients(bound("llama", "gated", plan, body), joined(wanted))


def test_a_loop_that_owns_the_loss_accumulates() -> None:
    given = batches(2)
    single = [dense_step(*models("llama", "gated"), b, clipped, draft_weight=0.3) for b in given]
    sums = {
        name: sum(
            joined(one)[name] * (1 if name.startswith("draft") else one.policy_count)
            for one in single
        )
        for name in joined(single[0])
    }

    def body(model: ParallelModel, rank: int) -> Any:
        for batch in given:
            own_loop(model, batch, 1, zero_between=False)
        model.finalize_grads()
        return gradients_of(model)

    found = bound("llama", "gated", Plan(cp=2, micro_batches=2), body)
    # transformers' norms compute in fp32, so that scaling a loss by 1 / count rounds its gradients
    assert_gradients(found, sums, tolerance=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [pytest.param("llama", marks=pytest.mark.slow), "llama_tied"])
def test_clip_norms_are_the_dense_ones_on_every_rank(target: str) -> None:
    given = batches(2)
    wanted = dense_step(*models(target, "gated"), given, clipped)
    squares = {
        group: sum(float(g.square().sum()) for g in grads.values()) ** 0.5
        for group, grads in (("policy", wanted.policy_grads), ("draft", wanted.draft_grads))
    }

    def body(model: ParallelModel, rank: int) -> Any:
        model.step(given[model.dp_rank], clipped)
        norms = model.clip_grad_norm_(policy=squares["policy"] / 4)
        after = model.clip_grad_norm_()
        assert abs(after["policy"] - squares["policy"] / 4) < 1e-4 * squares["policy"]
        assert after["draft"] == norms["draft"]
        return norms

    found = bound(target, "gated", EIGHT, body)
    for norms in found:
        assert norms == found[0]
        for group, value in squares.items():
            assert abs(norms[group] - value) < 1e-9 * value


@pytest.mark.parametrize("target", ["llama", "llama_tied"])
def test_exported_weights_are_the_state_dicts_of_the_plain_models(target: str) -> None:
    policy, draft = models(target, "gated")
    assert draft is not None

    def body(model: ParallelModel, rank: int) -> None:
        for which, module in (("policy", policy), ("draft", draft)):
            exported = dict(model.export_weights(which))
            plain = module.state_dict()
            assert list(exported) == list(plain)
            for name, value in plain.items():
                assert torch.equal(exported[name], value), name
        half = dict(model.export_weights("policy", dtype=torch.bfloat16))
        assert {value.dtype for value in half.values()} == {torch.bfloat16}

    bound(target, "gated", Plan(cp=2, pp=2), body)


def test_state_dict_round_trip_restores_weights_step_and_random_state() -> None:
    batch = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        model.step(batch, clipped)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(isinstance(value, Tensor) for value in state.values())
        assert int(state["step"]) == 1
        owned = [p for p in model.target.parameters() if p.device.type != "meta"]
        before = [p.detach().clone() for p in owned]
        with torch.no_grad():
            for parameter in owned:
                parameter.add_(1.0)
        model.step(batch, clipped)
        assert int(model.state_dict()["step"]) == 2
        model.load_state_dict(state)
        assert int(model.state_dict()["step"]) == 1
        for parameter, value in zip(owned, before, strict=True):
            assert torch.equal(parameter, value)
        name = next(n for n in state if n.startswith("policy."))
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            model.load_state_dict({k: v for k, v in state.items() if k != name})

    bound("llama", "gated", Plan(pp=2), body)


def test_random_state_is_restored() -> None:
    def body(model: ParallelModel, rank: int) -> None:
        state = model.state_dict()
        first = torch.rand(3)
        model.load_state_dict(state)
        assert torch.equal(torch.rand(3), first)

    bound("llama", "gated", Plan(), body)


def test_parameters_of_other_stages_are_on_meta_and_groups_line_up() -> None:
    def body(model: ParallelModel, rank: int) -> Any:
        groups = model.param_groups(policy={"lr": 1.0}, draft={"lr": 2.0})
        assert [(g["name"], g["lr"]) for g in groups] == [("policy", 1.0), ("draft", 2.0)]
        assert all(p.device.type != "meta" for g in groups for p in g["params"])
        real = {n for n, p in model.target.named_parameters() if p.device.type != "meta"}
        assert len(groups[0]["params"]) == len(real)
        assert model.draft is not None
        kinds = {p.device.type for p in model.draft.parameters()}
        assert kinds == ({"cpu"} if rank == 1 else {"meta"})
        assert (len(groups[1]["params"]) > 0) == (rank == 1)
        return real

    first, last = bound("llama", "gated", Plan(pp=2), body)
    assert not first & last
    assert first | last == {n for n, _ in models("llama", "gated")[0].named_parameters()}


def test_close_twice_and_use_after_close() -> None:
    def body(model: ParallelModel, rank: int) -> None:
        model.close()
        model.close()
        with pytest.raises(ConfigError, match="closed"):
            model.step(batches(1)[0], clipped)

    bound("llama", "gated", Plan(), body)


def bad_batches() -> dict[str, Any]:
    good = batches(1)[0]
    total = len(good.tokens)
    return {
        "not a batch": [1, 2, 3],
        "ids out of range": PackedBatch(good.tokens + VOCAB, good.cu_seqlens, good.loss_mask),
        "mask of another length": PackedBatch(good.tokens, good.cu_seqlens, good.loss_mask[:-1]),
        "offsets that go back": PackedBatch(
            good.tokens, torch.tensor([0, 9, 5, total]), good.loss_mask
        ),
        "field of another length": PackedBatch(
            good.tokens, good.cu_seqlens, good.loss_mask, {"advantages": torch.zeros(3)}
        ),
        "tokens that are None": PackedBatch(None, good.cu_seqlens, good.loss_mask),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("call", ["step", "logprobs", "evaluate", "counts", "forward"])
def test_a_malformed_batch_on_one_rank_raises_on_all_and_the_next_call_works(call: str) -> None:
    good = batches(1)[0]
    calls: dict[str, Any] = {
        "step": lambda model, batch: model.step(batch, clipped),
        "logprobs": lambda model, batch: model.logprobs(batch),
        "evaluate": lambda model, batch: model.evaluate(batch),
        "counts": lambda model, batch: model.counts(batch),
        "forward": lambda model, batch: model(batch),
    }

    def body(model: ParallelModel, rank: int) -> None:
        for name, bad in bad_batches().items():
            with pytest.raises(BatchError):
                calls[call](model, bad if rank == 1 else good)
            assert calls[call](model, good) is not None, name

    bound("llama", "gated", Plan(cp=2), body)


def test_different_batches_on_ranks_of_one_dp_index_are_refused() -> None:
    good, other = batches(2)

    def body(model: ParallelModel, rank: int) -> None:
        with pytest.raises(BatchError, match="same batch"):
            model.step(good if rank == 0 else other, clipped)
        with pytest.raises(BatchError, match="same arguments"):
            model.step(good, clipped, temperature=1.0 + rank)
        model.step(good, clipped)

    bound("llama", "gated", Plan(cp=2), body)


@pytest.mark.parametrize(
    "arguments", [{"temperature": 0}, {"temperature": "hot"}, {"denominator": -1}, {"draft_weight": float("nan")}]
)  # fmt: skip
def test_arguments_that_cannot_be_meant_are_refused_and_the_next_step_works(
    arguments: dict[str, Any],
) -> None:
    good = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            model.step(good, clipped, **arguments)
        model.step(good, clipped)

    bound("llama", "gated", Plan(cp=2), body)


@pytest.mark.parametrize("returned", ["not a tensor", "vector", "named list", "named text"])
def test_policy_losses_of_a_wrong_kind_are_refused(returned: str) -> None:
    good = batches(1)[0]

    def loss(rows: TokenOutputs) -> Any:
        wrong: dict[str, Any] = {
            "not a tensor": 1.5,
            "vector": rows.logprobs,
            "named list": (rows.logprobs.sum(), [1.0]),
            "named text": (rows.logprobs.sum(), {"a": "b"}),
        }
        return wrong[returned]

    def body(model: ParallelModel, rank: int) -> None:
        with pytest.raises((ConfigError, ValueError, TypeError)):
            model.step(good, loss)
        model.step(good, clipped)

    bound("llama", "gated", Plan(cp=2), body)


def test_evaluate_measures_and_changes_nothing() -> None:
    batch = batches(1)[0]
    wanted = dense_step(*models("qwen3", "eagle3"), batch, None)

    def body(model: ParallelModel, rank: int) -> None:
        found = model.evaluate(batch)
        assert abs(found.draft_loss - wanted.draft_loss) < 1e-9
        expected = wanted.draft_stats["acceptance"].reshape(-1).tolist()
        assert found.acceptance == pytest.approx(expected, abs=1e-9)
        assert all(grad is None for grad in gradients_of(model).values())
        assert int(model.state_dict()["step"]) == 0

    bound("qwen3", "eagle3", Plan(cp=2, pp=2, micro_batches=2), body)


class CountsActivations(torch.nn.Module):
    """Two losses, whose counts are known only once the target has run."""

    taps = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(32, 4, dtype=torch.float64)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        chosen = (inputs.features[:, :2] > 0) & inputs.loss_mask[:, None]
        x = self.mix(inputs.features).square().unflatten(-1, (2, 2)).sum(-1)
        return sc.DraftOutput((x * chosen).sum(0), chosen.sum(0))


@pytest.mark.parametrize("plan", [Plan(cp=2, pp=2, micro_batches=2), Plan(cp=2, dp=2)])
def test_counts_that_depend_on_activations_scale_gradients_at_the_end(plan: Plan) -> None:
    target, draft = models("llama", "none")[0], randomise(CountsActivations(), 4)
    given = batches(plan.dp)
    wanted = dense_step(target, draft, given, clipped, draft_weight=0.5)

    def body(model: ParallelModel, rank: int) -> Any:
        assert model.counts(given[model.dp_rank])[1] is None
        result = model.step(given[model.dp_rank], clipped, draft_weight=0.5)
        assert abs(result.draft_loss - wanted.draft_loss) < 1e-10
        return gradients_of(model)

    assert_gradients(run_models(plan, target, draft, body), joined(wanted))

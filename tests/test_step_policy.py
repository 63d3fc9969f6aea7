"""The policy's half of a step: untouched by the draft, exact ratios, losses over whole documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import ParallelModel, Plan
from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs

from .models import packed_batch, tiny_llama
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

WIDE = Plan(cp=2, pp=2, micro_batches=2)


class BrokenDraft(torch.nn.Module):
    """Its loss is not a number, and infinite in the next step."""

    taps = (1, 0)

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(64, 32, dtype=torch.float64)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        x = self.mix(inputs.features).sum(-1)
        bad = torch.where(inputs.positions == 1, (x - x) / 0.0, x.exp() / 0.0)
        return sc.DraftOutput((bad * inputs.loss_mask).sum(), inputs.loss_mask.sum())


def policy_only(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: g for name, g in grads.items() if name.startswith("policy.")}


def test_policy_gradients_are_bit_equal_with_draft_on_off_and_broken() -> None:
    batch = batches(1)[0]

    def body(train_draft: bool) -> Any:
        def step(model: ParallelModel, rank: int) -> Any:
            model.step(batch, clipped, train_draft=train_draft)
            return policy_only(gradients_of(model))

        return step

    on = bound("llama", "gated", WIDE, body(True))
    others = {
        "off": bound("llama", "gated", WIDE, body(False)),
        "none": bound("llama", "none", WIDE, body(True)),
        "broken": run_models(WIDE, models("llama", "none")[0], BrokenDraft(), body(True)),
    }
    for name, found in others.items():
        for rank, grads in enumerate(found):
            assert grads.keys() == on[rank].keys()
            for key, grad in grads.items():
                other = on[rank][key]
                assert grad is not None, key
                assert other is not None, key
                assert torch.equal(grad, other), f"{name}, rank {rank}: {key}"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)])
def test_ratio_to_logprobs_is_exactly_one(sizes: tuple[int, int, int], temperature: float) -> None:
    cp, pp, dp = sizes
    given = batches(dp)

    def body(model: ParallelModel, rank: int) -> int:
        batch = given[model.dp_rank]
        old = model.logprobs(batch, temperature=temperature)
        fields = {**batch.fields, "old": old}
        seen: list[Tensor] = []

        def loss(rows: TokenOutputs) -> Tensor:
            seen.append((rows.logprobs.detach() - rows.fields["old"]).exp())
            return (rows.logprobs * rows.mask).sum()

        again = PackedBatch(batch.tokens, batch.cu_seqlens, batch.loss_mask, fields)
        model.step(again, loss, temperature=temperature)
        assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in seen)
        return sum(ratio.numel() for ratio in seen)

    counted = bound("qwen3", "eagle3", Plan(cp=cp, pp=pp, dp=dp, micro_batches=2), body)
    assert sum(counted) == cp * sum(len(batch.tokens) for batch in given)


def test_logprobs_are_the_dense_ones_on_every_rank() -> None:
    given = batches(2)
    wanted = dense_step(*models("llama", "none"), given, None, temperature=0.7).logprobs
    plan = Plan(cp=2, dp=2, micro_batches=2)
    found = bound(
        "llama",
        "none",
        plan,
        lambda model, rank: (model.dp_rank, model.logprobs(given[model.dp_rank], temperature=0.7)),
    )
    for dp, logprobs in found:
        torch.testing.assert_close(logprobs, wanted[dp], rtol=1e-10, atol=1e-10)


def sequence_level(rows: TokenOutputs) -> Tensor:
    """GSPO: one importance ratio a document, the mean of its tokens' in logarithms."""
    number = int(rows.document.max()) + 1 if rows.document.numel() else 0
    gaps = (rows.logprobs - rows.fields["old_logprobs"]) * rows.mask
    sums = gaps.new_zeros(number).index_add(0, rows.document, gaps)
    lengths = gaps.new_zeros(number).index_add(0, rows.document, rows.mask.to(gaps.dtype))
    ratio = (sums / lengths.clamp(min=1)).exp()
    return -(ratio[rows.document] * rows.fields["advantages"] * rows.mask).sum()


def two_columns(rows: TokenOutputs) -> Tensor:
    weights = rows.fields["pair"]
    assert weights.shape == (len(rows.tokens), 2)
    return ((rows.logprobs * weights[:, 0] + rows.entropy * weights[:, 1]) * rows.mask).sum()


@pytest.mark.parametrize(("loss", "temperature"), [(sequence_level, 1.0), (two_columns, 0.6)])
def test_losses_see_whole_documents(loss: Any, temperature: float) -> None:
    given = batches(1)
    for batch in given:
        batch.fields["pair"] = torch.rand(len(batch.tokens), 2, dtype=torch.float64)  # type: ignore[index]
    wanted = dense_step(*models("llama", "none"), given, loss, temperature=temperature)

    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(given[model.dp_rank], loss, temperature=temperature)
        assert abs(result.policy_loss - wanted.policy_loss) < 1e-10
        return gradients_of(model)

    plan = Plan(cp=2, pp=2, micro_batches=3)
    assert_gradients(bound("llama", "none", plan, body), joined(wanted))


def test_policy_loss_none_trains_the_draft_alone() -> None:
    given = batches(1)
    wanted = dense_step(*models("llama", "gated"), given, None)

    def body(model: ParallelModel, rank: int) -> Any:
        for parameter in model.target.parameters():
            if parameter.device.type != "meta":
                parameter.grad = torch.ones_like(parameter)
        result = model.step(given[0], None)
        assert result.policy_loss == 0.0
        assert abs(result.draft_loss - wanted.draft_loss) < 1e-10
        grads = gradients_of(model)
        for name, grad in policy_only(grads).items():
            assert grad is not None, name
            assert torch.equal(grad, torch.ones_like(grad)), name
        return {name: g for name, g in grads.items() if name.startswith("draft.")}

    wanted.policy_grads = {}
    assert_gradients(bound("llama", "gated", WIDE, body), joined(wanted))


def test_an_exception_in_the_policy_loss_reaches_every_rank_and_the_next_step_works() -> None:
    batch = batches(1)[0]
    wanted = dense_step(*models("llama", "gated"), batch, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        def raising(rows: TokenOutputs) -> Tensor:
            if rank == 3:
                raise KeyError("no_such_field of this loss")
            return rows.logprobs.sum()

        with pytest.raises(Exception, match="no_such_field") as caught:
            model.step(batch, raising)
        text = "".join(__import__("traceback").format_exception(caught.value))
        assert 'raise KeyError("no_such_field of this loss")' in text
        assert all(grad is None for grad in gradients_of(model).values())
        result = model.step(batch, clipped)
        assert abs(result.policy_loss - wanted.policy_loss) < 1e-10
        return gradients_of(model)

    assert_gradients(bound("llama", "gated", WIDE, body), joined(wanted))


def test_a_failed_step_leaves_old_gradients_in_place() -> None:
    batch = batches(1)[0]

    def infinite(rows: TokenOutputs) -> Tensor:
        return rows.logprobs.sum() / 0.0

    def body(model: ParallelModel, rank: int) -> None:
        model.step(batch, clipped)
        before = gradients_of(model)
        with pytest.raises(Exception, match="finite"):
            model.step(batch, infinite)
        after = gradients_of(model)
        for name, grad in before.items():
            other = after[name]
            assert (grad is None) == (other is None)
            if grad is not None and other is not None:
                assert torch.equal(grad, other), name

    bound("llama", "gated", WIDE, body)


@pytest.mark.parametrize("lengths", [(1,), (), (0, 0), (1, 1, 1)])
def test_batches_without_a_single_prediction_give_zero(lengths: tuple[int, ...]) -> None:
    batch = packed_batch(lengths, vocab=VOCAB)

    def body(model: ParallelModel, rank: int) -> dict[str, Tensor | None]:
        result = model.step(batch, lambda rows: (rows.logprobs * rows.mask).sum())
        assert (result.policy_loss, result.draft_loss) == (0.0, 0.0)
        assert model.logprobs(batch).tolist() == [0.0] * sum(lengths)
        assert model.counts(batch)[0] == 0
        return gradients_of(model)

    for grads in bound("llama", "gated", Plan(cp=2, pp=2), body):
        assert all(grad is None or not grad.any() for grad in grads.values())


def test_all_masks_false_give_zero() -> None:
    batch = batches(1)[0]
    batch.loss_mask = torch.zeros_like(batch.loss_mask)

    def body(model: ParallelModel, rank: int) -> dict[str, Tensor | None]:
        result = model.step(batch, clipped)
        assert (result.policy_loss, result.draft_loss) == (0.0, 0.0)
        return gradients_of(model)

    for grads in bound("llama", "gated", WIDE, body):
        assert all(grad is None or not grad.any() for grad in grads.values())


def test_an_empty_batch_on_one_data_parallel_rank_changes_nothing() -> None:
    given = [batches(1)[0], packed_batch((), vocab=VOCAB)]
    wanted = dense_step(*models("qwen3", "eagle3"), given[0], clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(given[model.dp_rank], clipped)
        assert abs(result.policy_loss - wanted.policy_loss) < 1e-10
        assert abs(result.draft_loss - wanted.draft_loss) < 1e-10
        return gradients_of(model)

    plan = Plan(cp=2, dp=2, micro_batches=2)
    assert_gradients(bound("qwen3", "eagle3", plan, body), joined(wanted))


def test_a_target_without_embedding_gradients_is_trained_on_later_stages() -> None:
    target = tiny_llama(layers=2, vocab=VOCAB)
    target.get_input_embeddings().weight.requires_grad_(False)
    batch = batches(1)[0]
    wanted = dense_step(target, None, batch, clipped)

    def body(model: ParallelModel, rank: int) -> Any:
        model.step(batch, clipped)
        return gradients_of(model)

    assert_gradients(run_models(Plan(cp=2, pp=2), target, None, body), joined(wanted))

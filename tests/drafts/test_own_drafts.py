"""Drafts that the library does not contain, and the dense step that compiled steps are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.own_draft import TwoAhead
from spec_compile.contract import DraftOutput, TokenOutputs
from spec_compile.drafts import Eagle3
from tests.drafts.eagle3_by_document import eagle3_by_document
from tests.models import (
    gated_draft,
    packed_batch,
    randomise,
    tiny_llama,
    tiny_qwen3,
    window_draft,
)
from tests.oracle import dense_step, draft_inputs, gradients, run_target

DRAFTS: dict[str, Callable[[Any], Any]] = {
    "gated": gated_draft,
    "window": window_draft,
    "eagle3": lambda target: randomise(Eagle3.from_target(target, 3), 1),
}


def reinforce(rows: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (rows.logprobs - rows.fields["old_logprobs"]).exp()
    loss = -torch.where(rows.mask, ratio * rows.fields["advantages"], 0.0).sum()
    entropy = torch.where(rows.mask, rows.entropy, 0.0).sum()
    return loss - 0.1 * entropy, {"entropy": entropy, "ratio/max": ratio.max()}


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_loss_is_a_sum_over_documents(name: str) -> None:
    target = tiny_qwen3()
    draft = DRAFTS[name](target)
    whole = packed_batch((6, 9, 1), vocab=61)
    together = draft(draft_inputs(target, whole, run_target(target, whole, draft.taps, grad=False)))
    loss, count = torch.zeros(()).double(), torch.zeros((), dtype=together.count.dtype)
    for start, end in ((0, 6), (6, 15), (15, 16)):
        part = packed_batch((end - start,), vocab=61)
        part.tokens, part.loss_mask = whole.tokens[start:end], whole.loss_mask[start:end]
        row = run_target(target, part, draft.taps, grad=False)
        output = draft(draft_inputs(target, part, row))
        loss, count = loss + output.loss_sum.detach(), count + output.count
    torch.testing.assert_close(together.loss_sum.detach(), loss)
    torch.testing.assert_close(together.count, count)


@pytest.mark.parametrize("name", ["gated", "window"])
def test_every_parameter_of_an_own_draft_is_trained(name: str) -> None:
    target = tiny_qwen3()
    result = dense_step(target, DRAFTS[name](target), packed_batch(vocab=61), None)
    assert result.draft_loss > 0
    for parameter, grad in result.draft_grads.items():
        assert grad.abs().max() > 0, parameter


def test_own_draft_keeps_order_and_repeats_of_taps() -> None:
    target = tiny_qwen3()
    batch = packed_batch((5,), vocab=61)
    one = run_target(target, batch, (3, 0, 3), grad=False).features.split(32, -1)
    assert torch.equal(one[0], one[2])
    assert torch.equal(one[1], F.embedding(batch.tokens, target.get_input_embeddings().weight))


def test_dense_log_probs_are_minus_the_causal_loss_of_transformers() -> None:
    target = tiny_llama(dtype=torch.float32)
    batch = packed_batch((9, 0, 1, 14), dtype=torch.float32)
    logprobs = dense_step(target, None, batch, None).logprobs[0]
    for start, end in ((0, 9), (10, 24)):
        ids = batch.tokens[None, start:end]
        loss = target(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(-logprobs[start + 1 : end].mean(), loss.detach())
    assert logprobs[[0, 9, 10]].tolist() == [0, 0, 0]


def test_dense_policy_gradient_is_the_slope_of_the_policy_loss() -> None:
    target, batch = tiny_llama(layers=2, tied=True), packed_batch((6, 5))
    exact = dense_step(target, None, batch, reinforce, temperature=0.7)
    generator = torch.Generator().manual_seed(0)
    step, slope, losses = 1e-4, 0.0, []
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in target.named_parameters()
    }
    for name, grad in exact.policy_grads.items():
        slope += float((grad * direction[name]).sum())
    for sign in (1, -1):
        moved = copy.deepcopy(target)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p.add_(direction[name], alpha=sign * step)
        losses.append(dense_step(moved, None, batch, reinforce, temperature=0.7).policy_loss)
    # rotary angles and norms of the target are fp32, so the difference carries their noise
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("name", DRAFTS)
def test_two_batches_weigh_like_one(name: str) -> None:
    target = tiny_qwen3()
    draft = DRAFTS[name](target)
    parts = [packed_batch((7, 1), vocab=61, seed=1), packed_batch((0, 12), vocab=61, seed=2)]
    both = packed_batch((7, 1, 0, 12), vocab=61)
    for field in ("tokens", "loss_mask"):
        setattr(both, field, torch.cat([getattr(part, field) for part in parts]))
    both.fields = {k: torch.cat([part.fields[k] for part in parts]) for k in both.fields}
    ours = dense_step(target, draft, parts, reinforce, draft_weight=0.3)
    theirs = dense_step(target, draft, both, reinforce, draft_weight=0.3)
    assert ours.policy_loss == pytest.approx(theirs.policy_loss, rel=1e-9)
    assert ours.draft_loss == pytest.approx(theirs.draft_loss, rel=1e-9)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-9)
    for grads, others in (
        (ours.policy_grads, theirs.policy_grads),
        (ours.draft_grads, theirs.draft_grads),
    ):
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, others[parameter], rtol=1e-8, atol=1e-10)


def test_explicit_denominators_replace_the_counts() -> None:
    target = tiny_qwen3()
    draft, batch = gated_draft(target), packed_batch(vocab=61)
    plain = dense_step(target, draft, batch, reinforce)
    fixed = dense_step(target, draft, batch, reinforce, denominator=10.0, draft_denominator=20.0)
    assert plain.draft_count is not None
    assert fixed.policy_loss == pytest.approx(plain.policy_loss * plain.policy_count / 10)
    assert fixed.draft_loss == pytest.approx(plain.draft_loss * float(plain.draft_count) / 20)
    assert fixed.metrics["ratio/max"] == plain.metrics["ratio/max"]


def test_second_eagle3_gives_the_same_dense_step() -> None:
    target, batch = tiny_qwen3(tied=True), packed_batch((7, 1, 13, 0, 3), vocab=61)
    draft = randomise(Eagle3.from_target(target, 3), 1)

    def second(inputs: Any) -> DraftOutput:
        weights = dict(draft.named_parameters())
        loss, count, accepted = eagle3_by_document(weights, draft.config, inputs, theta=10000.0)
        return DraftOutput(loss, count, {"acceptance": accepted, "acceptance_count": count})

    ours = dense_step(target, draft, batch, reinforce, draft_weight=0.5)
    theirs = dense_step(target, draft, batch, reinforce, draft_weight=0.5, draft_body=second)
    assert ours.draft_loss == pytest.approx(theirs.draft_loss, abs=1e-9)
    torch.testing.assert_close(ours.draft_stats, theirs.draft_stats, rtol=1e-9, atol=1e-9)
    for parameter, grad in ours.draft_grads.items():
        torch.testing.assert_close(grad, theirs.draft_grads[parameter], rtol=1e-9, atol=1e-9)


def test_no_draft_gradient_reaches_the_target() -> None:
    target = tiny_qwen3()
    for make in DRAFTS.values():
        draft, batch = make(target), packed_batch((8, 5), vocab=61)
        output = draft(
            draft_inputs(target, batch, run_target(target, batch, draft.taps, grad=True))
        )
        for name, grad in gradients(output.loss_sum.sum(), target).items():
            assert not grad.any(), name


def test_dense_step_leaves_modules_as_they_were() -> None:
    target = tiny_qwen3()
    draft = gated_draft(target)
    target.train()
    target.model.layers[1].eval()
    dense_step(target, draft, packed_batch((4,), vocab=61), reinforce)
    assert target.training
    assert not target.model.layers[1].training
    assert all(p.grad is None for p in (*target.parameters(), *draft.parameters()))


def test_example_draft_learns_when_run_plainly() -> None:
    target = tiny_qwen3(dtype=torch.float32)
    draft, batch = TwoAhead(dim=32, vocab=61), packed_batch((13, 29, 22), vocab=61)
    randomise(draft, 4)
    inputs = draft_inputs(target, batch, run_target(target, batch, draft.taps, grad=False))
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        output = draft(inputs)
        (output.loss_sum / output.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss_sum.detach() / output.count))
    assert losses[-1] < 0.5 * losses[0]

"""Every draft's sums and gradients equal those of a second implementation, row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs
from spec_compile.drafts import MTP, DFlash, DSpark, PEagle
from tests.drafts import by_document
from tests.models import packed_batch, randomise, tiny_qwen3
from tests.oracle import draft_inputs, gradients, run_target

LENGTHS = (7, 9, 1, 0, 12, 3)
ANCHORS = (0, 4, 6, 7, 9, 15, 16, 20, 28, 29, 31, -1, -1)
"""First and last rows of documents among them, one of a single token, blocks that cross their end."""
KNOWN = list(range(0, 61, 3))
"""Ids of a reduced vocabulary."""
REDUCED: dict[str, Any] = {"draft_vocab": torch.tensor(KNOWN), "num_hidden_layers": 1}


def inputs_for(target: Any, draft: nn.Module) -> DraftInputs:
    vocab = target.get_output_embeddings().weight.shape[0]
    batch = packed_batch(LENGTHS, vocab=vocab, draft_mask=True, seed=3)
    batch.anchors = torch.tensor(ANCHORS)
    taps: Any = draft.taps
    return draft_inputs(target, batch, run_target(target, batch, taps, grad=False))


def assert_same_gradients(draft: nn.Module, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    second = gradients(theirs.sum(), draft)
    for name, grad in gradients(ours.sum(), draft).items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, second[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "options", [{}, {"num_hidden_layers": 2, "qk_norm": True}, {"num_steps": 1}]
)
def test_mtp(options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = randomise(MTP.from_target(target, **options), seed=2)
    inputs = inputs_for(target, draft)
    output = draft(inputs)
    losses, counts = by_document.mtp(dict(draft.named_parameters()), draft.config, inputs)
    assert output.count.tolist() == counts
    slope = torch.arange(1, len(losses) + 1)
    assert_same_gradients(draft, output.loss_sum * slope, torch.stack(losses) * slope)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_hidden_layers": 1, "num_depths": 2, "qk_norm": True}, {"anchors_per_document": 3}],
)
def test_peagle(options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = randomise(
        PEagle.from_target(target, **{"num_depths": 3, "num_hidden_layers": 2, **options}), seed=2
    )
    inputs = inputs_for(target, draft)
    output = draft(inputs)
    loss, count = by_document.peagle(dict(draft.named_parameters()), draft.config, inputs)
    assert int(output.count) == count
    assert_same_gradients(draft, output.loss_sum, loss)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_hidden_layers": 1, "block_size": 2, "qk_norm": False},
        {"num_hidden_layers": 1, "sample_from_anchor": True},
        {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 2},
        {"num_hidden_layers": 1, "loss_type": "kl"},
        REDUCED,
        {**REDUCED, "loss_type": "kl"},
        {**REDUCED, "loss_type": "kl", "skip_unknown": False},
    ],
    ids=",".join,
)
def test_dflash(options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = randomise(
        DFlash.from_target(target, **{"block_size": 4, "num_hidden_layers": 2, **options}), seed=2
    )
    inputs = inputs_for(target, draft)
    output = draft(inputs)
    known = KNOWN if "draft_vocab" in options else None
    loss, count = by_document.dflash(dict(draft.named_parameters()), draft.config, inputs, known)
    assert float(output.count) == pytest.approx(count, rel=1e-12)
    assert_same_gradients(draft, output.loss_sum, loss)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_hidden_layers": 1, "block_size": 1, "markov_rank": 2},
        {"num_hidden_layers": 1, "markov_head_type": "gated"},
        {"num_hidden_layers": 1, "markov_head_type": "rnn", "sample_from_anchor": False},
        REDUCED,
        {**REDUCED, "teacher_law": "draft"},
    ],
    ids=",".join,
)
def test_dspark(options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = randomise(
        DSpark.from_target(
            target, **{"block_size": 4, "num_hidden_layers": 2, "markov_rank": 6, **options}
        ),
        seed=2,
    )
    inputs = inputs_for(target, draft)
    output = draft(inputs)
    known, weights = KNOWN if "draft_vocab" in options else None, dict(draft.named_parameters())
    loss, count, accepted = by_document.dspark(weights, draft.config, inputs, known)
    assert float(output.count) == pytest.approx(count, rel=1e-12)
    assert float(output.stats["acceptance"]) == pytest.approx(accepted, rel=1e-12)
    assert_same_gradients(draft, output.loss_sum, loss)


@pytest.mark.parametrize("family", [DFlash, DSpark])
def test_unused_anchors_change_nothing(family: type[DFlash]) -> None:
    target = tiny_qwen3()
    draft = randomise(family.from_target(target, 4, num_hidden_layers=2), seed=2)
    inputs = inputs_for(target, draft)
    assert inputs.anchors is not None
    used = dataclasses.replace(inputs, anchors=inputs.anchors[inputs.anchors >= 0])
    with_unused, without = draft(inputs), draft(used)
    assert float(with_unused.count) == float(without.count)
    assert_same_gradients(draft, with_unused.loss_sum, without.loss_sum)

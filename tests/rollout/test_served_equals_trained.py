"""Logits of the training forward equal those of a cached decoder that is fed the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile.contract import DraftInputs
from spec_compile.runtime.rollout.drafters import serve
from spec_compile.runtime.rollout.drafting import TargetEnds, Unread
from tests.models import packed_batch, randomise, tiny_qwen3
from tests.oracle import draft_inputs, run_target

LENGTHS = (11, 1, 6)
DOCUMENTS = ((0, 11), (12, 6))
"""First row and length of those with a row to predict from."""
ANCHORS = torch.tensor([f + t for f, n in DOCUMENTS for t in range(1, n)])


def build(family: str, target: Any, **options: Any) -> Any:
    kinds: dict[str, Any] = {
        "eagle3": lambda: sc.drafts.Eagle3.from_target(target, 4, **options),
        "mtp": lambda: sc.drafts.MTP.from_target(target, 3, num_hidden_layers=2, **options),
        "peagle": lambda: sc.drafts.PEagle.from_target(target, 4, num_hidden_layers=3, **options),
        "dflash": lambda: sc.drafts.DFlash.from_target(target, 5, num_hidden_layers=2, **options),
        "dspark": lambda: sc.drafts.DSpark.from_target(
            target, 4, num_hidden_layers=2, markov_rank=6, **options
        ),
    }
    return randomise(kinds[family](), seed=3)


def inputs_of(target: Any, draft: Any, anchors: Tensor | None = None) -> DraftInputs:
    batch = packed_batch(LENGTHS, vocab=61, draft_mask=True)
    made = draft_inputs(target, batch, run_target(target, batch, draft.taps, grad=False))
    return dataclasses.replace(made, anchors=anchors)


def outputs_of_training(draft: Any, inputs: DraftInputs) -> list[Tensor]:
    """What the final norm gives, call after call: what the head reads."""
    with torch.no_grad():
        return heard(draft, inputs)


def heard(draft: Any, inputs: DraftInputs) -> list[Tensor]:
    """`outputs_of_training` where a gradient may be taken."""
    seen: list[Tensor] = []
    norm = draft.mtp.norm if hasattr(draft, "mtp") else draft.norm
    handle = norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    draft(inputs)
    handle.remove()
    return seen


def decoder(draft: Any, target: Any) -> Any:
    ends = TargetEnds(target.get_input_embeddings(), target.get_output_embeddings(), 61)
    return serve(draft, ends, last_position=99)


def head_of(draft: Any, target: Any) -> Tensor:
    weight: Tensor = getattr(draft, "lm_head", target.lm_head).weight
    return weight.detach()


SLIDING = "sliding_attention"
KNOWN = torch.arange(2, 61, 5)
CHAINS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"layer_types": (SLIDING,), "sliding_window": 3}),
    (
        "eagle3",
        {"num_hidden_layers": 2, "layer_types": ("full_attention", SLIDING), "sliding_window": 3},
    ),
    ("mtp", {}),
    ("peagle", {}),
]


@pytest.mark.parametrize(("family", "options"), CHAINS, ids=str)
def test_every_step_of_every_row_equals_a_cached_decoder(
    family: str, options: dict[str, Any]
) -> None:
    target = tiny_qwen3()
    draft = build(family, target, **options)
    inputs = inputs_of(target, draft)
    outputs = outputs_of_training(draft, inputs)
    assert_chains(draft, target, inputs, [F.linear(x, head_of(draft, target)) for x in outputs])


def assert_chains(draft: Any, target: Any, inputs: DraftInputs, trained: list[Tensor]) -> None:
    """Logits of every step, [T, V] each, are those of a decoder that reads one token after another."""
    features = inputs.features if draft.taps else inputs.teacher.hidden
    checked = 0
    with torch.no_grad():
        for first, length in DOCUMENTS:
            tokens = inputs.tokens[first : first + length]
            served = decoder(draft, target)
            for t in range(length - 1):
                rows = features[first + t : first + t + 1]
                made = served.draft(Unread([1], [t], tokens[t + 1 : t + 2], [rows]), len(trained))
                for k in range(min(len(trained), length - 1 - t)):
                    found = made.logits(tokens[t + 1 + k : t + 2 + k])[0]
                    torch.testing.assert_close(found, trained[k][first + t], rtol=1e-10, atol=1e-10)
                    checked += 1
    steps = len(trained)
    assert checked == sum(min(steps, n - 1 - t) for _, n in DOCUMENTS for t in range(n - 1))


BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {}),
    ("dflash", {"sample_from_anchor": True}),
    ("dflash", {"layer_types": (SLIDING, "full_attention"), "sliding_window": 3}),
    ("dspark", {}),
    ("dspark", {"markov_head_type": "gated"}),
    ("dspark", {"markov_head_type": "rnn", "sample_from_anchor": False}),
    ("dflash", {"draft_vocab": KNOWN}),
    ("dspark", {"draft_vocab": KNOWN}),
]


@pytest.mark.parametrize(("family", "options"), BLOCKS, ids=str)
def test_every_block_equals_that_of_a_cached_decoder(family: str, options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = build(family, target, **options)
    inputs = inputs_of(target, draft, ANCHORS)
    hidden = outputs_of_training(draft, inputs)[0].unflatten(0, (len(ANCHORS), -1))
    assert_blocks(draft, target, inputs, hidden)


def assert_blocks(draft: Any, target: Any, inputs: DraftInputs, hidden: Tensor) -> None:
    """Logits from the states of every slot, [A, slots, D], are those of a decoder at the block's anchor."""
    trained = F.linear(hidden[:, draft.first_slot :], head_of(draft, target))
    columns = draft.columns()
    columns = torch.arange(61) if columns is None else columns
    unknown = torch.ones(61, dtype=torch.bool).index_fill(0, columns, False)
    block = 0
    with torch.no_grad():
        for first, length in DOCUMENTS:
            tokens = inputs.tokens[first : first + length]
            served = decoder(draft, target)
            for a in range(1, length):
                rows = inputs.features[first + a - 1 : first + a]
                made = served.draft(Unread([0], [a - 1], tokens[a : a + 1], [rows]), 3)
                state = None
                for j in range(min(draft.num_draft_tokens, length - a)):
                    previous, expected = tokens[a + j : a + j + 1], trained[block, j]
                    if hasattr(draft, "markov_head"):
                        slot = hidden[block, draft.first_slot + j][None]
                        bias, state = markov_bias(draft.markov_head, slot, previous, state)
                        expected = expected + bias[0]
                    found = made.logits(previous)[0]
                    torch.testing.assert_close(found[columns], expected, rtol=1e-10, atol=1e-10)
                    assert bool(found[unknown].isneginf().all())
                block += 1
    assert block == len(ANCHORS)


def markov_bias(
    head: Any, hidden: Tensor, previous: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Spell the three heads out for one slot."""
    vector = head.markov_w1.weight[previous]
    if head.kind == "gated":
        gate = head.gate_proj
        opened = F.linear(torch.cat((hidden, vector), 1), gate.weight, gate.bias).sigmoid()
        vector = opened * vector
    if head.kind == "rnn":
        state = torch.zeros_like(vector) if state is None else state
        joint = head.joint_proj
        parts = F.linear(torch.cat((state, vector, hidden), 1), joint.weight, joint.bias).split(
            6, 1
        )
        keep = parts[0].sigmoid()
        state, vector = keep * state + (1 - keep) * parts[1].tanh(), parts[2].tanh()
    return vector @ head.markov_w2.weight.T, state


@pytest.mark.parametrize("family", ["peagle", "dflash", "dspark"])
def test_rows_read_together_give_the_same_draft_as_rows_read_one_by_one(family: str) -> None:
    target = tiny_qwen3()
    draft = build(family, target)
    features = torch.randn(9, len(draft.taps) * 32, dtype=torch.float64)
    tokens = torch.arange(9)
    previous = torch.tensor([7, 8])
    with torch.no_grad():
        together = decoder(draft, target)
        both = Unread([2, 0], [0, 0], tokens, [features[:5], features[5:]])
        expected = together.draft(both, 3).logits(previous)
        singly = decoder(draft, target)
        for slot, start, stop, row in ((2, 0, 5, 0), (0, 5, 9, 1)):
            for t in range(start, stop - 1):
                one = Unread([slot], [t - start], tokens[t : t + 1], [features[t : t + 1]])
                singly.read(one)
            last = slice(stop - 1, stop)
            one = Unread([slot], [stop - 1 - start], tokens[last], [features[last]])
            found = singly.draft(one, 3).logits(previous[row : row + 1])[0]
            torch.testing.assert_close(found, expected[row], rtol=1e-10, atol=1e-10)

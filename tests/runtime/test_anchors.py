from __future__ import annotations

import dataclasses

import pytest
import torch

from spec_compile.checked_batch import CheckedBatch, check_batch, take_documents
from spec_compile.runtime.anchors import AnchorRule, deal_anchors, draw_anchors, padded_anchors
from spec_compile.runtime.micro_batch import deal, make_micro_batch
from tests.models import packed_batch

RULE = AnchorRule(4, seed=7)
LENGTHS = (7, 21, 1, 35, 0, 3)


def checked(
    lengths: tuple[int, ...] = LENGTHS, seed: int = 0, anchor_seed: int = 0
) -> CheckedBatch:
    batch = packed_batch(lengths, vocab=53, seed=seed, draft_mask=True)
    batch.anchor_seed = anchor_seed
    return check_batch(batch, 53)


def in_documents(batch: CheckedBatch, anchors: torch.Tensor) -> list[list[int]]:
    """Positions of the anchors of each document."""
    return [
        batch.positions[anchors[batch.document[anchors] == d]].tolist()
        for d in range(batch.num_documents)
    ]


def test_a_document_draws_the_same_anchors_wherever_it_lies() -> None:
    batch = checked()
    alone = in_documents(batch, draw_anchors(batch, RULE))
    for docs in ([3], [5, 3, 1], [0, 1, 2, 3, 4, 5], [4, 3]):
        part = take_documents(batch, docs)
        assert in_documents(part, draw_anchors(part, RULE)) == [alone[d] for d in docs]


def test_anchors_are_ascending_rows_whose_next_token_is_a_target() -> None:
    batch = checked()
    anchors = draw_anchors(batch, RULE)
    assert bool((anchors.diff() > 0).all())
    assert bool(batch.draft_mask[anchors + 1].all())
    assert torch.equal(batch.document[anchors], batch.document[anchors + 1])
    sizes = [len(found) for found in in_documents(batch, anchors)]
    targets = [int(batch.draft_mask[batch.document == d].sum()) for d in range(6)]
    assert sizes == [min(4, number) for number in targets]


@pytest.mark.parametrize("what", ["plan", "batch", "tokens"])
def test_anchors_change_with_either_seed_and_with_the_tokens(what: str) -> None:
    batch = checked((300,))
    rule, other = RULE, batch
    if what == "plan":
        rule = AnchorRule(4, seed=8)
    elif what == "batch":
        other = dataclasses.replace(batch, anchor_seed=1)
    else:
        other = dataclasses.replace(batch, tokens=(batch.tokens + 1) % 53)
    assert draw_anchors(batch, RULE).tolist() == draw_anchors(batch, RULE).tolist()
    assert draw_anchors(other, rule).tolist() != draw_anchors(batch, RULE).tolist()


def test_every_candidate_is_drawn_equally_often() -> None:
    batch = check_batch(packed_batch((21,), vocab=53), 53)
    batch = dataclasses.replace(batch, draft_mask=batch.positions > 0)
    counts = torch.zeros(21)
    for seed in range(2000):
        counts[draw_anchors(dataclasses.replace(batch, anchor_seed=seed), RULE)] += 1
    assert counts[20] == 0
    expected, deviation = 2000 * 4 / 20, (2000 * 0.2 * 0.8) ** 0.5
    assert float((counts[:20] - expected).abs().max()) < 5 * deviation


@pytest.mark.parametrize("count", [0, 1, 4, 11])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_every_rank_gets_as_many_anchors_and_each_anchor_once(count: int, cp: int) -> None:
    padded = padded_anchors(torch.arange(count), cp)
    each = len(padded) // cp
    assert (len(padded), padded[:count].tolist()) == (cp * each, list(range(count)))
    assert each == max(2, -(-count // cp))
    assert bool((padded[count:] == -1).all())
    slots = deal_anchors(padded, torch.arange(count), cp).reshape(cp, each)
    assert bool((slots.diff(dim=1) > 0).all())
    assert sorted(slots.flatten().tolist()) == list(range(len(padded)))
    used = [(padded[own] >= 0).sum() for own in slots]
    assert max(used) - min(used) <= 1


def test_given_anchors_reach_the_graph_unfiltered() -> None:
    batch = packed_batch(LENGTHS, vocab=53)
    batch.anchors = torch.tensor([0, 6, 7, 27, 28, 66, -1])
    whole = check_batch(batch, 53)
    inputs = make_micro_batch(take_documents(whole, [1, 2, 5]), 2, RULE).inputs
    assert inputs["anchors"].tolist() == [0, 20, 21, 24]


@pytest.mark.parametrize("given", [None, torch.tensor([8, 30, -1])], ids=["drawn", "given"])
def test_a_batch_is_dealt_on_the_host_whatever_the_default_device_is(
    given: torch.Tensor | None,
) -> None:
    batch = packed_batch(LENGTHS, vocab=53)
    batch.anchors = given
    plain = deal(check_batch(batch, 53), num_micro_batches=2, max_tokens=None, cp=2, anchors=RULE)
    with torch.device("meta"):  # as scripts set "cuda"
        checked_there = check_batch(batch, 53)
        there = deal(checked_there, num_micro_batches=2, max_tokens=None, cp=2, anchors=RULE)
    for one, other in zip(plain, there, strict=True):
        assert one.vectors.keys() == other.vectors.keys()
        for name, x in one.vectors.items():
            assert torch.equal(x, other.vectors[name]), name

"""Faults reported of other trainers in what a draft reads at a row: ids, masks, positions, taps, embeddings.

Each row's values come back through the compiled step itself, so ids are compared exactly, not through a loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_compile import ParallelModel
from tests.probe import IDS, column, distinct, expected, probed, target

SHIFTED = ("next", "second", "next mask", "second mask", "row")


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lengths",
    [(32,), (8,), (3, 5), (5, 3, 9), (1, 0, 2, 1, 30)],
    ids=["a33 one document", "a32 eight", "a13 two", "a06 odd ones", "tiny ones"],
)
def test_a06_a13_a32_a33_ids_masks_and_positions_are_those_of_one_device(
    lengths: tuple[int, ...], cp: int
) -> None:
    batch = distinct(lengths)
    found, wanted = probed(batch, cp=cp), expected(batch)
    for name in IDS:
        assert torch.equal(column(found, name, batch.tokens), wanted[name]), name


def test_a38_a_supervised_span_across_ranks_has_the_pairs_of_one_device() -> None:
    batch = distinct((32,))
    batch.loss_mask = (torch.arange(32) >= 5) & (torch.arange(32) < 29)
    found = probed(batch, cp=2)
    for step, (label, mask) in enumerate((("next", "next mask"), ("second", "second mask")), 1):
        labels = column(found, label, batch.tokens)[:, 0].tolist()
        valid = column(found, mask, batch.tokens)[:, 0].bool().tolist()
        rows = [t for t in range(32) if 5 <= t + step < 29]
        assert [t for t in range(32) if valid[t]] == rows
        assert [labels[t] for t in rows] == batch.tokens[[t + step for t in rows]].tolist()


@pytest.mark.parametrize(("cp", "pp"), [(2, 1), (2, 2)])
def test_a53_a62_taps_and_recomputed_logits_are_the_targets_own(cp: int, pp: int) -> None:
    """A tap of 1 is the stream after one layer; the logits need the final norm."""
    batch = distinct((5, 3, 9))
    found, wanted = probed(batch, cp=cp, pp=pp), expected(batch)
    for name in ("features", "logits"):
        got = column(found, name, batch.tokens)
        torch.testing.assert_close(got, wanted[name], rtol=1e-12, atol=1e-12)


def test_a63_channel_zero_is_the_token_in_every_micro_batch_and_every_time() -> None:
    lengths = (7, 20, 1, 13, 0, 6)
    batch = distinct(lengths)

    def other(model: ParallelModel) -> None:
        model.step(distinct(lengths[::-1], seed=4), None)
        model.draft.zero_grad()  # type: ignore[union-attr]

    for before in (None, other):
        found = probed(batch, cp=2, pp=2, micro_batches=2, before=before)
        # tap 0 is the embedding, and it lies behind tap 1
        streams = column(found, "features", batch.tokens)
        assert torch.equal(streams[:, 8], batch.tokens.double())
        assert torch.equal(column(found, "token", batch.tokens)[:, 0], batch.tokens.double())


def test_a48_micro_batches_of_unequal_sizes_bring_every_row_its_own_taps() -> None:
    batch = distinct((24, 24, 16))
    whole = probed(batch, cp=2)
    parts = probed(batch, cp=2, pp=2, micro_batches=3)
    for name in ("features", "embedding", "logits"):
        one, other = (column(found, name, batch.tokens) for found in (whole, parts))
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_a46_every_lane_of_eight_ranks_gets_the_taps_of_its_own_documents() -> None:
    """With two replicas and two shards the rank of the last stage is not the group's last number."""
    batches = [distinct((5, 3, 9)), distinct((20, 1, 4), first=32, seed=1)]
    found = probed(batches, cp=2, pp=2, dp=2, micro_batches=2)
    for batch in batches:
        wanted = expected(batch)
        for name in ("features", "embedding", "token", "next"):
            got = column(found, name, batch.tokens)
            torch.testing.assert_close(got, wanted[name], rtol=1e-12, atol=1e-12)


def test_a51_the_draft_reads_the_embedding_of_another_stage_as_it_is_now() -> None:
    batch = distinct((5, 3, 9))

    def trained(model: ParallelModel) -> None:
        model.step(batch, None)
        model.draft.zero_grad()  # type: ignore[union-attr]
        trained_target: Any = model.target
        weight = trained_target.get_input_embeddings().weight
        if not weight.is_meta:
            with torch.no_grad():
                weight.mul_(3.0)

    for before, factor in ((None, 1.0), (trained, 3.0)):
        found = probed(batch, cp=2, pp=2, before=before)
        got = column(found, "embedding", batch.tokens)
        assert torch.equal(got, factor * expected(batch)["embedding"])
    assert torch.equal(target().get_input_embeddings().weight[:, 0], torch.arange(64).double())

"""The layout planner: permutation, padding, balance, dealing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile.errors import BatchError, ConfigError
from spec_compile.runtime.layout import (
    RowLayout,
    deal_documents,
    num_micro_batches_for,
    plan_layout,
)

LENGTHS = st.lists(st.integers(0, 90) | st.integers(0, 3), max_size=24)
CP = st.integers(1, 6)


def work_by_rank(layout: RowLayout, lengths: list[int]) -> list[int]:
    work_of_row = [position + 1 for length in lengths for position in range(length)]
    return [
        sum(work_of_row[row] for row in layout.rows(rank).tolist() if row < layout.num_tokens)
        for rank in range(layout.cp)
    ]


@given(LENGTHS, CP)
@settings(max_examples=150, deadline=None)
def test_slots_are_a_permutation(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp)
    assert layout.slots.dtype == np.int64
    assert sorted(layout.slots.tolist()) == list(range(cp * layout.rows_per_rank))
    assert layout.num_tokens == sum(lengths)


@given(LENGTHS, CP)
@settings(max_examples=150, deadline=None)
def test_rows_ascend_inside_each_rank(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp)
    for rank in range(cp):
        rows = layout.rows(rank)
        assert len(rows) == layout.rows_per_rank
        assert bool((np.diff(rows) > 0).all())


@given(LENGTHS, CP)
@settings(max_examples=150, deadline=None)
def test_padding_is_the_least_possible(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp)
    total = sum(lengths)
    assert layout.rows_per_rank == max(2, -(-total // cp))
    if total >= 2 * cp:
        assert cp * layout.rows_per_rank - total < cp
        assert layout.padding_share < cp / total


@given(LENGTHS, CP)
@settings(max_examples=150, deadline=None)
def test_reported_work_is_the_sum_over_owned_rows(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp)
    expected = work_by_rank(layout, lengths)
    assert layout.work.tolist() == expected
    mean = sum(expected) / cp
    assert layout.imbalance == pytest.approx(max(expected) / mean if mean else 1.0)


@given(LENGTHS, CP)
@settings(max_examples=150, deadline=None)
def test_busiest_rank_exceeds_the_mean_by_a_few_rows_only(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp)
    slack = 4 * max(lengths, default=0) + 2 * cp * cp
    assert int(layout.work.max()) <= 1.05 * layout.work.sum() / cp + slack


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_realistic_batches_are_balanced_within_two_percent(cp: int) -> None:
    random = np.random.default_rng(7)
    batches = [
        [8191],
        [5000, 17, 3, 1, 0, 999],
        random.integers(50, 2000, 40).tolist(),
        (random.pareto(1.2, 60) * 100).astype(int).clip(1, 20000).tolist(),
        [4000] + [1] * 5000,
        [257] * 9,
    ]
    for lengths in batches:
        assert plan_layout(lengths, cp).imbalance <= 1.02, lengths


@pytest.mark.parametrize("cp", [4, 8, 16])
def test_documents_of_unfriendly_lengths_are_cut_seldom(cp: int) -> None:
    """Each piece ends in the middle of a kernel's tile of 128 rows, so tiles grow with pieces."""
    lengths = np.random.default_rng(0).lognormal(np.log(2500), 0.9, 48).astype(int).tolist()
    layout = plan_layout(lengths, cp)
    document = np.repeat(np.arange(len(lengths)), lengths)
    pieces = tiles = 0
    for rank in range(cp):
        rows = layout.rows(rank)
        rows = rows[rows < layout.num_tokens]
        ends = np.flatnonzero((np.diff(rows) != 1) | (np.diff(document[rows]) != 0))
        sizes = np.diff([0, *(ends + 1), len(rows)])
        pieces += len(sizes)
        tiles += int((-(-sizes // 128)).sum())
    assert layout.imbalance <= 1.0101
    assert pieces <= len(lengths) + 4 * cp
    # whole documents end in 24 tiles' worth of half empty ones, however they are laid
    assert tiles <= sum(lengths) / 128 + pieces / 2 + cp


def work_by_keys(layout: RowLayout, lengths: list[int]) -> list[int]:
    later_rows = [length - position for length in lengths for position in range(length)]
    return [
        sum(later_rows[row] for row in layout.rows(rank).tolist() if row < layout.num_tokens)
        for rank in range(layout.cp)
    ]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_work_is_even_where_the_keys_are_when_it_is_done_there(cp: int) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(1500), 1.0, 60).astype(int).tolist()
    layout = plan_layout(lengths, cp, by_keys=True)
    for work in (work_by_rank(layout, lengths), work_by_keys(layout, lengths)):
        assert max(work) * cp <= 1.06 * sum(work)


def test_many_short_documents_stay_whole() -> None:
    lengths = [40, 33, 47, 41, 38, 36, 44, 45] * 8
    layout = plan_layout(lengths, 2)
    owner = np.empty(len(layout.slots), dtype=np.int64)
    for rank in range(2):
        owner[layout.rows(rank)] = rank
    bounds = np.cumsum([0, *lengths])
    cut = [len(set(owner[low:high].tolist())) > 1 for low, high in pairwise(bounds)]
    assert sum(cut) <= 1


def test_one_long_document_is_zigzagged() -> None:
    layout = plan_layout([16], 2)
    assert layout.rows(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert layout.rows(1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 1, 0]])
@pytest.mark.parametrize("cp", [1, 3])
def test_nearly_empty_micro_batches_have_two_rows_a_rank(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp)
    assert layout.rows_per_rank == 2
    assert layout.num_tokens == sum(lengths)


@given(LENGTHS)
@settings(max_examples=50, deadline=None)
def test_one_rank_keeps_packed_order(lengths: list[int]) -> None:
    assert plan_layout(lengths, 1).slots.tolist() == list(range(max(2, sum(lengths))))


@given(LENGTHS, CP)
@settings(max_examples=30, deadline=None)
def test_layout_is_deterministic(lengths: list[int], cp: int) -> None:
    first = plan_layout(lengths, cp).slots
    again = plan_layout(np.array(lengths, dtype=np.int32), cp).slots  # type: ignore[arg-type]
    assert np.array_equal(first, again)


def test_negative_length_is_refused() -> None:
    with pytest.raises(BatchError, match="0 or more, found -1"):
        plan_layout([3, -1], 2)


@given(LENGTHS, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_every_document_is_dealt_once_in_order(lengths: list[int], count: int) -> None:
    dealt = deal_documents(lengths, count)
    assert len(dealt) == count
    assert sorted(d for documents in dealt for d in documents) == list(range(len(lengths)))
    assert all(documents == sorted(documents) for documents in dealt)


@given(LENGTHS, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_dealt_work_differs_by_one_document_at_most(lengths: list[int], count: int) -> None:
    def work(documents: list[int]) -> int:
        return sum(4096 * lengths[d] + lengths[d] * (lengths[d] + 1) // 2 for d in documents)

    loads = [work(documents) for documents in deal_documents(lengths, count)]
    longest = max(range(len(lengths)), key=lambda d: lengths[d], default=None)
    assert max(loads) - min(loads) <= (work([longest]) if longest is not None else 0)


def test_fewer_documents_than_micro_batches_leave_empty_ones() -> None:
    assert deal_documents([5, 9], 4) == [[1], [0], [], []]


@given(LENGTHS, st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_chosen_number_keeps_micro_batches_within_the_limit(lengths: list[int], cap: int) -> None:
    count = num_micro_batches_for(lengths, cap)
    for documents in deal_documents(lengths, count, max_tokens=cap):
        filled = [lengths[d] for d in documents if lengths[d]]
        assert sum(filled) <= cap or len(filled) == 1
    assert count >= -(-sum(min(length, cap) for length in lengths) // cap)


def test_number_of_micro_batches_is_small() -> None:
    assert num_micro_batches_for([50, 50, 50, 50], 100) == 2
    assert num_micro_batches_for([], 100) == 1
    assert num_micro_batches_for([300, 20, 20], 100) == 2


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 micro-batch or more"):
        deal_documents([1], 0)

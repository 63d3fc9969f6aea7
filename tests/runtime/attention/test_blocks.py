"""Block plans: what they cover, and how much they compute for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_compile.runtime.attention import dense, masked
from spec_compile.runtime.attention.blocks import BlockPlan, cached_plan, plan_blocks
from spec_compile.runtime.attention.intervals import Intervals

Array = npt.NDArray[np.int64]


def counts(plan: BlockPlan) -> Array:
    """How often each (row, unsorted key) is computed and visible."""
    num_sorted = plan.num_keys if plan.order is None else len(plan.order)
    seen = np.zeros((plan.num_rows, num_sorted), dtype=np.int64)
    for block in plan.blocks:
        shape = (block.q1 - block.q0, block.k1 - block.k0)
        visible = np.ones(shape, dtype=bool)
        if block.mask is not None:
            visible = plan.masks[block.mask]
        if block.causal:
            assert shape[0] == shape[1]
            visible = np.tril(visible)
        seen[block.q0 : block.q1, block.k0 : block.k1] += visible
    if plan.order is None:
        return seen
    unsorted = np.zeros((plan.num_rows, plan.num_keys), dtype=np.int64)
    unsorted[:, plan.order] = seen
    return unsorted


def visible_pairs(q_group: Array, low: Array, high: Array, k_group: Array, k_index: Array) -> Array:
    same = q_group[:, None] == k_group[None]
    inside = (k_index[None] >= low[:, None]) & (k_index[None] < high[:, None])
    visible: Array = (same & inside).astype(np.int64)
    return visible


def packed(
    lengths: list[int], window: int | None = None
) -> tuple[Array, Array, Array, Array, Array]:
    document = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(document))
    low = np.zeros_like(index) if window is None else index + 1 - window
    return document, low, index + 1, document, index


@given(
    st.lists(st.integers(0, 40), max_size=8), st.integers(1, 4), st.integers(0, 1000),
    st.sampled_from([None, 1, 3, 17]), st.sampled_from([1, 30, 2048]),
)  # fmt: skip
def test_every_visible_pair_is_computed_exactly_once(
    lengths: list[int], cp: int, seed: int, window: int | None, call_cost: int
) -> None:
    q_group, low, high, k_group, k_index = packed(lengths, window)
    draw = np.random.default_rng(seed)
    part = draw.integers(0, cp, len(q_group)) == 0
    keys = draw.integers(0, cp, len(q_group)) == 0
    vectors = (q_group[part], low[part], high[part], k_group[keys], k_index[keys])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "CALL_COST", call_cost)
        plan = plan_blocks(*vectors)
    np.testing.assert_array_equal(counts(plan), visible_pairs(*vectors))
    layers = np.zeros((plan.num_layers, plan.num_rows), dtype=np.int64)
    for block in plan.blocks:
        layers[block.layer, block.q0 : block.q1] += 1
    assert layers.max(initial=0) <= 1


@given(st.integers(0, 1000), st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 2048]))
def test_groups_in_any_order_are_covered(seed: int, rows: int, keys: int, call_cost: int) -> None:
    draw = np.random.default_rng(seed)
    q_group, k_group = draw.integers(-1, 5, rows), draw.integers(-1, 6, keys)
    high, index = draw.integers(0, 12, rows), draw.integers(0, 10, keys)
    vectors = (q_group, high - draw.integers(0, 6, rows), high, k_group, index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "CALL_COST", call_cost)
        plan = plan_blocks(*vectors)
    np.testing.assert_array_equal(counts(plan), visible_pairs(*vectors))


@given(
    st.lists(st.integers(1, 9), max_size=30), st.integers(0, 1000), st.sampled_from([1, 8, 40]),
    st.sampled_from([3, 16]),
)  # fmt: skip
def test_dense_blocks_and_what_they_leave_cover_every_pair_once(
    steps: list[int], seed: int, stair_rows: int, short_rows: int
) -> None:
    """Runs of rows that see ever more keys, or a document's own, or start again."""
    draw = np.random.default_rng(seed)
    low, high = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    end = 0
    for rows in steps:
        end = int(draw.integers(0, 60)) if draw.random() < 0.2 else end + int(draw.integers(0, 7))
        rise = np.arange(rows) if draw.random() < 0.3 else np.zeros(rows, dtype=np.int64)
        low = np.append(low, np.full(rows, min(end, int(draw.integers(0, 2)) * 5)))
        high = np.append(high, end + rise)
        end = int(high[-1])
    num_keys = int(high.max(initial=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "LEAST_SCORES", 20)
        patch.setattr(dense, "STAIR_ROWS", stair_rows)
        patch.setattr(dense, "SHORT_ROWS", short_rows)
        blocks, rest, layers = dense.cut_dense(low, high, num_keys)
    key = np.arange(num_keys)
    seen = np.zeros((len(low), num_keys), dtype=np.int64)
    if rest is not None:
        seen += (key >= rest.low[:, None]) & (key < rest.high[:, None])
    on_layer = np.zeros((max(1, layers), len(low)), dtype=np.int64)
    on_layer[0] += rest is not None
    for block in blocks:
        shape = (block.q1 - block.q0, block.k1 - block.k0)
        ones = np.ones(shape, dtype=np.int64)
        seen[block.q0 : block.q1, block.k0 : block.k1] += np.tril(ones) if block.causal else ones
        on_layer[block.layer, block.q0 : block.q1] += 1
    np.testing.assert_array_equal(seen, (key >= low[:, None]) & (key < high[:, None]))
    assert on_layer.max(initial=0) <= 1


def test_blocks_at_anchors_are_mostly_dense() -> None:
    high = np.sort(np.random.default_rng(0).integers(0, 32768, 512)).repeat(16)
    _, rest, layers = dense.cut_dense(np.zeros_like(high), high, 32768)
    assert layers == 2
    assert rest is not None
    assert rest.num_scores <= 0.2 * high.sum()


def test_one_document_is_one_causal_block() -> None:
    plan = plan_blocks(*packed([3000]))
    assert [(b.causal, b.mask) for b in plan.blocks] == [(True, None)]


def test_a_zigzagged_document_is_causal_at_home_and_full_against_earlier_chunks() -> None:
    q_group, low, high, k_group, k_index = packed([4000])
    own = np.r_[0:1000, 3000:4000]
    other = np.r_[1000:3000]
    home = plan_blocks(q_group[own], low[own], high[own], k_group[own], k_index[own])
    assert [b.causal for b in home.blocks] == [True]
    away = plan_blocks(q_group[own], low[own], high[own], k_group[other], k_index[other])
    assert [(b.q0, b.q1, b.k0, b.k1, b.causal, b.mask) for b in away.blocks] == [
        (1000, 2000, 0, 2000, False, None)
    ]


def test_a_tile_without_visible_keys_has_no_block() -> None:
    q_group, low, high, k_group, k_index = packed([500, 500])
    plan = plan_blocks(q_group[:500], low[:500], high[:500], k_group[500:], k_index[500:])
    assert plan.blocks == ()
    assert plan.num_layers == 0


@pytest.mark.parametrize("length", [1, 8, 37, 200])
def test_packed_short_documents_never_cost_a_square(length: int) -> None:
    plan = plan_blocks(*packed([length] * (8192 // length)))
    assert plan.num_scores <= 8192 * (length + 128)
    assert sum(mask.size for mask in plan.masks) <= 10 * 256**2


def test_a_window_costs_its_width() -> None:
    plan = plan_blocks(*packed([8192], window=512))
    assert plan.num_scores <= 8192 * (512 + 2 * masked.WINDOW_ROWS)
    assert sum(mask.size for mask in plan.masks) <= 10 * 256**2


def test_block_queries_see_their_prefix_without_a_mask_over_it() -> None:
    anchors = np.arange(100, 4000, 60)
    q_high = np.repeat(anchors, 8)
    group = np.zeros(4000, dtype=np.int64)
    plan = plan_blocks(np.zeros_like(q_high), np.zeros_like(q_high), q_high, group, np.arange(4000))
    assert plan.num_scores <= 2 * q_high.sum()
    assert sum(mask.size for mask in plan.masks) <= 0.2 * q_high.sum()


def test_a14_a_plan_is_remembered_by_contents() -> None:
    first = cached_plan(*packed([7, 5]))
    assert cached_plan(*packed([7, 5])) is first
    assert cached_plan(*packed([5, 7])) is not first


@pytest.mark.parametrize("most_keys", [1, 7, 64, None])
def test_the_backward_sees_every_pair_once_however_few_keys_it_takes(most_keys: int | None) -> None:
    rows = np.arange(40, 60)
    plan = plan_blocks(rows * 0, rows * 0, rows + 1, np.zeros(60, np.int64), np.arange(60))
    cut = plan.backward_blocks(most_keys)
    free = [b for b in cut if not b.causal and b.mask is None]
    assert all(b.k1 - b.k0 <= (most_keys or 60) for b in free)
    assert [b.k0 for b in cut] == sorted(b.k0 for b in cut)
    assert np.array_equal(counts(dataclasses.replace(plan, blocks=cut)), counts(plan))


@given(st.integers(0, 1000), st.integers(1, 70), st.integers(0, 40))
def test_lists_of_seen_keys_leave_out_only_tiles_that_no_row_sees(
    seed: int, num_keys: int, num_rows: int
) -> None:
    draws = np.random.default_rng(seed)
    low = draws.integers(0, num_keys + 1, num_rows)
    high = np.minimum(num_keys, low + draws.integers(0, 9, num_rows))
    intervals = Intervals(low, high, num_keys)
    seen = np.zeros(num_keys, dtype=bool)
    for a, b in zip(low, high, strict=True):
        seen[a:b] = True
    lists = {
        every: intervals.key_lists(4, 8, torch.device("cpu"), every_key=every)
        for every in (True, False)
    }
    assert sorted(lists[True].tiles[:, 0].tolist()) == list(range(0, num_keys, 8))
    firsts = [first for first in range(0, num_keys, 8) if seen[first : first + 8].any()]
    assert sorted(lists[False].tiles[:, 0].tolist()) == firsts
    assert torch.equal(lists[False].items, lists[True].items)
    assert np.array_equal(intervals.seen, seen)
    assert intervals.seen_share == pytest.approx(seen.mean())

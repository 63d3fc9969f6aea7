"""What evens out on GPUs: the cost of pieces, against the blocks that are cut, and layouts that even it out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile import Plan
from spec_compile.bench.shards import packed_lengths
from spec_compile.runtime import calls
from spec_compile.runtime.attention.blocks import plan_blocks
from spec_compile.runtime.attention.interface import Cut
from spec_compile.runtime.balance import measure_balance
from spec_compile.runtime.calls import Caller
from spec_compile.runtime.kernel_cost import DENSE, PAIRS, KernelCost, cost_on, kernel_cost
from spec_compile.runtime.layout import RowLayout, _traded, plan_layout

SMALL = KernelCost(1 << 9, 2)
"""Blocks from 32 rows on, so that documents of tests have some."""
LENGTHS = st.lists(st.integers(0, 300) | st.integers(0, 20), max_size=24)
CP = st.integers(1, 6)


def kernel_pairs(layout: RowLayout, lengths: list[int], rank: int) -> tuple[int, int]:
    """Causal pairs of a rank in dense blocks and outside, by the plan that its kernels run."""
    total = layout.num_tokens
    document = np.full(len(layout.slots), len(lengths))
    document[:total] = np.repeat(np.arange(len(lengths)), lengths)
    rows = layout.rows(rank)
    limit = np.where(rows < total, rows + 1, 0)
    plan = plan_blocks(
        document[rows], np.zeros_like(limit), limit, document, np.arange(len(document)), Cut.DENSE
    )
    inside = sum(
        (b.q1 - b.q0) * (b.q1 - b.q0 + 1) // 2 if b.causal else (b.q1 - b.q0) * (b.k1 - b.k0)
        for b in plan.blocks
    )
    rest = plan.rest
    return inside, 0 if rest is None else int((rest.high - rest.low).clip(0).sum())


def num_pieces(layout: RowLayout, lengths: list[int]) -> int:
    document = np.repeat(np.arange(len(lengths)), lengths)
    count = 0
    for rank in range(layout.cp):
        rows = layout.rows(rank)
        rows = rows[rows < layout.num_tokens]
        count += 1 + int(((np.diff(rows) != 1) | (np.diff(document[rows]) != 0)).sum())
    return count


@pytest.mark.parametrize("seed", [0, 3])
def test_work_is_what_the_blocks_of_each_rank_cost(seed: int) -> None:
    lengths = list(packed_lengths(65536, seed))
    layout = plan_layout(lengths, 4, kernels=DENSE)
    pairs = [kernel_pairs(layout, lengths, rank) for rank in range(4)]
    assert any(inside for inside, _ in pairs)
    assert layout.work.tolist() == [inside + DENSE.factor * outside for inside, outside in pairs]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_cost_is_even_where_pairs_are_not_and_pieces_stay_few(cp: int) -> None:
    lengths = list(packed_lengths(131072))
    plain, layout = plan_layout(lengths, cp), plan_layout(lengths, cp, kernels=DENSE)
    assert layout.work.max() <= 1.01 * layout.work.mean()
    assert layout.work.min() >= 0.98 * layout.work.mean()
    whole = sum(DENSE.of(0, length) for length in lengths)
    assert whole / (cp * layout.work.max()) >= 0.97
    assert num_pieces(layout, lengths) <= num_pieces(plain, lengths) + cp


@pytest.mark.parametrize("lengths", [(39430,), (20000, 20000), (1376, 47138)])
def test_layouts_by_cost_have_no_more_pieces_where_those_by_pairs_cost_less(
    lengths: tuple[int, ...],
) -> None:
    sizes, capacity = np.array(lengths), -(-sum(lengths) // 16)
    found = _traded(sizes, 16, capacity, DENSE)
    by_pairs = _traded(sizes, 16, capacity, PAIRS).counted(DENSE)
    assert max(found.costs) <= max(by_pairs.costs)
    assert found.kernels == DENSE
    layout = plan_layout(lengths, 16, kernels=DENSE)
    assert layout.work.tolist() == found.work


@given(LENGTHS, CP)
@settings(max_examples=50, deadline=None)
def test_layouts_by_cost_are_permutations_of_as_many_rows_a_rank(
    lengths: list[int], cp: int
) -> None:
    layout = plan_layout(lengths, cp, kernels=SMALL)
    assert sorted(layout.slots.tolist()) == list(range(cp * layout.rows_per_rank))
    assert layout.rows_per_rank == max(2, -(-sum(lengths) // cp))
    for rank in range(cp):
        assert bool((np.diff(layout.rows(rank)) > 0).all())
    again = plan_layout(np.array(lengths, dtype=np.int32), cp, kernels=SMALL)  # type: ignore[arg-type]
    assert np.array_equal(layout.slots, again.slots)


@given(LENGTHS, CP)
@settings(max_examples=50, deadline=None)
def test_busiest_rank_costs_at_most_the_longest_document_more_than_the_mean(
    lengths: list[int], cp: int
) -> None:
    layout = plan_layout(lengths, cp, kernels=SMALL)
    longest = max((SMALL.of(0, n) for n in lengths), default=0)
    assert layout.work.max() <= 1.01 * layout.work.sum() / cp + longest


@given(LENGTHS, CP)
@settings(max_examples=50, deadline=None)
def test_reported_balance_is_that_of_the_cost(lengths: list[int], cp: int) -> None:
    layout = plan_layout(lengths, cp, kernels=SMALL)
    found = measure_balance(layout, lengths)
    assert found.peak == pytest.approx(int(layout.work.max()))
    assert found.imbalance == pytest.approx(layout.imbalance)


def test_only_kernels_that_take_dense_blocks_weigh_pairs() -> None:
    assert kernel_cost({"cudnn"}) == kernel_cost({"flash_attn_3", "cudnn"}) == DENSE
    assert kernel_cost({"cudnn", "triton"}) == kernel_cost({"math"}) == PAIRS
    assert kernel_cost(()) == cost_on(torch.device("cpu"), torch.float32, (), "auto") == PAIRS


@pytest.mark.parametrize(("peer", "expected"), [(True, DENSE), (False, PAIRS)])
def test_one_rank_without_dense_blocks_has_all_ranks_count_pairs(
    peer: bool, expected: KernelCost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "cost_on", lambda *_: DENSE)
    control = SimpleNamespace(all_gather=lambda own, deadline_s: [own, peer])
    rank = SimpleNamespace(
        _plan=Plan(cp=2, param_dtype="bfloat16"),
        _world=SimpleNamespace(device=torch.device("cuda"), control=control),
        _attentions=(),
    )
    assert Caller._agree_on_kernels(rank) == expected  # type: ignore[arg-type]


def test_work_that_is_done_where_the_keys_are_is_counted_in_pairs() -> None:
    lengths = list(packed_lengths(32768))
    plain = plan_layout(lengths, 4, by_keys=True)
    assert np.array_equal(plan_layout(lengths, 4, by_keys=True, kernels=DENSE).slots, plain.slots)

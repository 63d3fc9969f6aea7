"""What a step reports about its layout, counted pair by pair, and the dealing of anchors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_compile.runtime.anchors import deal_anchors, padded_anchors
from spec_compile.runtime.balance import CAUSAL, Balance, measure_balance
from spec_compile.runtime.layout import plan_layout

LENGTHS = (7, 21, 1, 35, 0, 3)
WINDOWED = replace(CAUSAL, window=5, heads=(4, 2), head_dim=8)
BRANCHED = replace(CAUSAL, branch_keys=3, heads=(2, 2))
BLOCKS = replace(CAUSAL, slots=4, branch_keys=4, heads=(3, 1), window=9)


def positions(lengths: tuple[int, ...]) -> list[int]:
    return [p for n in lengths for p in range(n)]


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_imbalance_counts_every_visible_pair_of_rows_and_of_anchors(cp: int) -> None:
    layout = plan_layout(LENGTHS, cp)
    anchors = padded_anchors(torch.tensor([0, 6, 9, 20, 27, 30, 40, 61]), cp)
    place = positions(LENGTHS)
    slots = deal_anchors(anchors, torch.tensor(place), cp)
    n, a = layout.rows_per_rank, len(anchors) // cp

    def ranks(kind: str) -> list[int]:
        work = []
        for rank in range(cp):
            rows = [r for r in layout.slots[rank * n : (rank + 1) * n].tolist() if r < sum(LENGTHS)]
            used = [r for r in anchors[slots[rank * a : (rank + 1) * a]].tolist() if r >= 0]
            if kind == "windowed":
                work.append(32 * sum(min(place[r] + 1, 5) for r in rows))
            elif kind == "branched":
                work.append(2 * sum(place[r] + 1 + 3 for r in rows))
            else:
                work.append(3 * 4 * sum(min(place[r], 9) + 4 for r in used))
        return work

    found = measure_balance(
        layout, LENGTHS, [WINDOWED, BRANCHED, BLOCKS], anchors.numpy(), slots.numpy()
    )
    each = [ranks(kind) for kind in ("windowed", "branched", "blocks")]
    assert found.peak == sum(max(work) for work in each)
    assert found.mean == pytest.approx(sum(sum(work) / cp for work in each))
    assert (found.rows, found.dead_rows) == (cp * n, cp * n - sum(LENGTHS))


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,)])
def test_hardly_any_rows_have_a_balance(lengths: tuple[int, ...]) -> None:
    layout = plan_layout(lengths, 3)
    found = measure_balance(layout, lengths, [CAUSAL, BLOCKS], np.full(6, -1), np.arange(6))
    assert found.imbalance == (3.0 if sum(lengths) else 1.0)
    assert found.padding == (6 - sum(lengths)) / 6


def test_balances_add_up() -> None:
    total = Balance(6.0, 4.0, 1, 10) + Balance(2.0, 2.0, 0, 6)
    assert (total.imbalance, total.padding) == (8 / 6, 1 / 16)
    assert str(total).startswith(
        "attention work of the busiest rank 1.333 times the mean, 6.25% of 16"
    )


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(4000,), (2041, 137, 89, 3, 1, 700)])
def test_anchors_are_dealt_to_equal_work(lengths: tuple[int, ...], cp: int) -> None:
    draw = np.random.default_rng(0)
    start, found = 0, []
    for length in lengths:
        found.append(start + np.sort(draw.permutation(length)[: min(256, length)]))
        start += length
    anchors = padded_anchors(torch.from_numpy(np.concatenate(found)), cp)
    slots = deal_anchors(anchors, torch.tensor(positions(lengths)), cp)
    balance = measure_balance(
        plan_layout(lengths, cp), lengths, [BLOCKS, replace(BLOCKS, window=None)],
        anchors.numpy(), slots.numpy(),
    )  # fmt: skip
    assert balance.imbalance < 1.02


def test_a15_eight_documents_of_two_hundred_rows_need_no_padding() -> None:
    found = measure_balance(plan_layout([200] * 8, 4), [200] * 8)
    assert (found.padding, found.imbalance) == (0.0, 1.0)

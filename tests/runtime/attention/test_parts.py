"""Sums of gradients that come in parts, or are added right to a running sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_compile.runtime.attention import parts


def test_a_sum_of_parts_holds_few_of_them_and_gives_the_same_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "LEAST_ROWS", 4)
    like, draw = torch.zeros(12, 2, 3), torch.Generator().manual_seed(0)
    places = torch.tensor([3, 2, 1, 0, 11, 10, 9, -1, 8, 4, 5, 6], dtype=torch.int32)
    ranges = [(0, 3), (1, 5), (5, 9), (2, 4), (0, 12), (9, 12)]
    for order in (None, places):
        running = parts.Sum(like, places=order, dtype=torch.float64)
        want, most = torch.zeros(12, 2, 3, dtype=torch.float64), 0
        for first, end in ranges:
            grad = torch.randn(end - first, 2, 3, generator=draw)
            running.add(first, grad)
            want[first:end] += grad
            most = max(most, len(running._parts))
        if order is not None:
            want = torch.where((order >= 0)[:, None, None], want[order.clamp(0)], 0.0)
        assert most < len(ranges)
        torch.testing.assert_close(running.result(), want.float())
        torch.testing.assert_close(running.onto(torch.ones(12, 2, 3)), want.float() + 1)


def test_parts_far_apart_are_added_without_what_lies_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total, sizes, add_up = torch.ones(50, 2, 3), [], parts.add_up

    def watched(found: list[parts.Part], like: Tensor, **options: Tensor) -> Tensor:
        sizes.append(len(like))
        return add_up(found, like, **options)

    monkeypatch.setattr(parts, "add_up", watched)
    running = parts.Sum(total, total=total)
    want = total.clone()
    for first, end in ((40, 44), (3, 8), (6, 9), (9, 12), (3, 4)):
        running.add(first, torch.full((end - first, 2, 3), 2.0))
        want[first:end] += 2
    running.settle()
    assert torch.equal(total, want)
    assert sizes == [12 - 3, 44 - 40]


def test_parts_of_few_rows_wait_until_they_are_many() -> None:
    running = parts.Sum(torch.zeros(12, 2, 3), total=torch.zeros(12, 2, 3))
    for rows, held in ((2, 2), (2, 4), (3, 0)):
        running.add(1, torch.ones(rows, 2, 3))
        running.settle(keep=4)
        assert sum(len(part.grad) for part in running._parts) == held
    assert float(running.result()[1, 0, 0]) == 3


@pytest.mark.parametrize(
    ("seen", "dtype", "placed", "begun", "pays"),
    [
        (0.9, None, False, True, True),
        (0.9, None, False, False, False),
        (0.2, None, False, False, True),
        (0.2, torch.float64, False, False, False),
        (0.2, torch.float64, False, True, True),
        (0.2, None, True, True, False),
    ],
)
def test_a_kernel_adds_in_place_where_the_sum_has_begun_or_zeros_are_cheaper(
    seen: float, dtype: torch.dtype | None, placed: bool, begun: bool, pays: bool
) -> None:
    like = torch.zeros(4, 1, 2)
    places = torch.arange(4, dtype=torch.int32) if placed else None
    running = parts.Sum(like, dtype=dtype, places=places)
    if begun:
        running.add(0, torch.ones(4, 1, 2))
        running.settle()
    assert running.in_place_pays(seen) is pays


def test_a_running_sum_in_half_a_type_is_no_less_exact_than_one_of_rounded_parts() -> None:
    """Seven readers, each with a block of keys and a rest that overlaps with it."""
    draw, like = torch.Generator().manual_seed(0), torch.zeros(128, 4, 32, dtype=torch.bfloat16)
    in_place, by_parts = parts.Sum(like), parts.Sum(like)
    exact = torch.zeros(like.shape, dtype=torch.float64)
    for _ in range(7):
        block = torch.randn(8, 4, 32, generator=draw).bfloat16()
        rest = torch.zeros(like.shape)
        rest[10:26] = torch.randn(16, 4, 32, generator=draw)
        exact[16:24] += block
        exact += rest
        total = in_place.running()
        total[10:26] = (total[10:26] + rest[10:26]).bfloat16()
        in_place.add(16, block)
        in_place.settle(keep=len(like) // 2)
        by_parts.add(16, block)
        by_parts.add(0, rest.bfloat16())
        by_parts.settle()
    errors = [
        float((x.result().double() - exact)[keys].norm())
        for keys in (slice(None), slice(16, 24))
        for x in (in_place, by_parts)
    ]
    assert 0 < errors[0] < errors[1]
    assert 0 < errors[2] < errors[3]

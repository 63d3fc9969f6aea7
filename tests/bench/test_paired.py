"""How one time is compared with another of nearly the same length."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from spec_compile.bench.goals import OF_STEP
from spec_compile.bench.paired import LEAST_PAIRS, WARMUP, Excess, in_turn


@pytest.mark.parametrize("n", [6, 8, 21, 60, 200])
def test_the_interval_holds_the_true_median_in_nearly_95_of_100_cases(n: int) -> None:
    rng = random.Random(n)
    cases, held = 2000, 0
    for _ in range(cases):
        times = [1.01 * rng.lognormvariate(0, 0.03) for _ in range(n)]
        found = Excess.of(times, [1.0] * n)
        held += found.low <= 0.01 <= found.high
    assert 0.93 < held / cases < 0.995


def test_too_few_pairs_for_an_interval_have_none_and_no_verdict() -> None:
    found = Excess.of([1.1, 2.4], [1.0, 2.0])
    assert found.median == pytest.approx(0.15)
    assert found.half_width == math.inf
    line = OF_STEP.judge("hidden 64", 15.0, (100 * found.low, 100 * found.high))
    assert line.endswith("(-inf to inf), cannot be told")


def test_pairs_are_added_until_the_interval_is_narrow() -> None:
    rng = random.Random(0)

    def noisy() -> float:
        return rng.lognormvariate(0, 0.02)

    def still() -> float:
        return 1.0

    def count(call: Callable[[], float], least: int, most: int) -> int:
        return len(in_turn(call, still, least, most, 0.005)[0])

    assert count(still, 8, 100) == 8
    assert count(still, 1, 100) == LEAST_PAIRS
    assert 30 < count(noisy, 5, 1000) < 300
    assert count(noisy, 5, 20) == 20


def test_each_goes_first_as_often_and_pairs_stay_pairs() -> None:
    order = []
    clock = itertools.count(1)

    def call(name: str) -> float:
        order.append(name)
        return float(next(clock))

    times, others = in_turn(lambda: call("a"), lambda: call("b"), 4, 4, 0.0)
    assert "".join(order) == "abba" * ((4 + WARMUP) // 2)
    assert [abs(a - b) for a, b in zip(times, others, strict=True)] == [1.0] * 4


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((0.1, 1.9), "met"), ((1.0, 3.0), "cannot be told"), ((2.1, 3.0), "MISSED")],
)
def test_a_goal_within_the_interval_is_neither_met_nor_missed(
    interval: tuple[float, float], verdict: str
) -> None:
    line = OF_STEP.judge("hidden 1024", sum(interval) / 2, interval)
    assert line.endswith(f", {verdict}")
    assert f"({interval[0]:.4g} to {interval[1]:.4g})" in line

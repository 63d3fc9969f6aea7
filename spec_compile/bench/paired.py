"""How one time stands to another where each varies more than the two differ.

Both are timed in turn, so that what drifts (clocks, other work of the host) meets both alike, and the ratio
within a pair is one sample. A median of few such samples may lie percents beside what many would give; its
95 % interval, from the ranks of the sorted samples, takes pairs as independent, however they are spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WARMUP = 2
"""Pairs that do not count."""
_HALF_OF_95 = 1.96 / 2
"""In standard deviations of a rank: the normal form of the binomial law, exact to a rank."""
LEAST_PAIRS = 6
"""The spread of fewer holds their median in less than 95 of 100 cases."""


@dataclass(frozen=True)
class Excess:
    """By how much one time exceeds another, as a share of the other, over several pairs."""

    median: float
    low: float
    """The lower end of the median's 95 % interval; below all numbers with fewer than `LEAST_PAIRS`."""
    high: float
    quartiles: tuple[float, float]
    """Half of the pairs lie between."""
    pairs: int

    @classmethod
    def of(cls, times: Sequence[float], others: Sequence[float]) -> Excess:
        """Summarise pairs of times in one unit, two or more."""
        found = sorted(a / b - 1 for a, b in zip(times, others, strict=True))
        n = len(found)
        first, median, third = statistics.quantiles(found, n=4)
        if n < LEAST_PAIRS:
            return cls(median, -math.inf, math.inf, (first, third), n)
        rank = max(1, math.floor(n / 2 - _HALF_OF_95 * math.sqrt(n)))
        return cls(median, found[rank - 1], found[n - rank], (first, third), n)

    @property
    def half_width(self) -> float:
        """Of the interval."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        first, third = self.quartiles
        return (
            f"{self.median:+.2%} ({self.low:+.2%} to {self.high:+.2%}; "
            f"half of {self.pairs} pairs {first:+.2%} to {third:+.2%})"
        )


def in_turn(
    one: Callable[[], float],
    other: Callable[[], float],
    least: int,
    most: int,
    half_width: float,
) -> tuple[list[float], list[float]]:
    """Time pairs until the interval of their `Excess` is as narrow as ``half_width``, or there are ``most``.

    Ranks that take part in one measurement stop together if their calls return the same times.

    Returns:
        The times of ``one`` and of ``other``, pair by pair; each goes first as often as the other.
    """
    times: list[float] = []
    others: list[float] = []
    for turn in range(most + WARMUP):
        if turn % 2:
            second = other()
            first = one()
        else:
            first = one()
            second = other()
        if turn < WARMUP:
            continue
        times.append(first)
        others.append(second)
        if (
            len(times) >= max(LEAST_PAIRS, least)
            and Excess.of(times, others).half_width <= half_width
        ):
            break
    return times, others

"""What taps are held to on GPUs, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A bound on one figure."""

    figure: str
    bound: float
    unit: str
    at_least: bool

    def judge(self, where: str, found: float, interval: tuple[float, float] | None = None) -> str:
        """Compare in one line; where an ``interval`` holds the bound, there is no verdict."""
        ends = {self._met(end) for end in interval or (found,)}
        between = f" ({interval[0]:.4g} to {interval[1]:.4g})" if interval else ""
        verdict = "cannot be told" if len(ends) > 1 else "met" if ends == {True} else "MISSED"
        return f"goal: {self}; {where}: {found:.4g}{self.unit}{between}, {verdict}"

    def _met(self, found: float) -> bool:
        return found >= self.bound if self.at_least else found <= self.bound

    def judge_from(self, size_mib: float, payload_mib: float, found: float) -> str:
        """Compare payloads of ``size_mib`` and more; smaller ones get no verdict."""
        if payload_mib >= size_mib:
            return self.judge(f"{payload_mib:g} MiB", found)
        return (
            f"goal from {size_mib:g} MiB on: {self}; {payload_mib:g} MiB: {found:.4g}{self.unit}, "
            "not judged"
        )

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        return f"{self.figure} {sign} {self.bound:g}{self.unit}"


OF_RAW = Goal("bandwidth, of a raw copy between the same processes,", 85, " %", at_least=True)
OF_STAGING = Goal("bandwidth, of staging through the host,", 20, "x", at_least=True)
BANDWIDTH = Goal("bandwidth a direction between two GPUs", 340, " GB/s", at_least=True)
LATENCY = Goal("latency of 4 MiB between two GPUs", 60, " us", at_least=False)
OF_STEP = Goal("what transport adds to a step", 2, " %", at_least=False)
GOALS = (OF_RAW, OF_STAGING, BANDWIDTH, LATENCY, OF_STEP)
BANDWIDTH_FROM_MIB = 32
"""Smaller payloads between two GPUs are held to no bandwidth."""
ONE_GPU_FROM_MIB = 128
"""Smaller payloads between processes that share a GPU are held to none.

A copy inside a GPU is so fast that what hosts do for a push takes as long as tens of MiB. For scale:
taps of 4096 tokens, of three layers of width 4096 in bfloat16, are 96 MiB.
"""

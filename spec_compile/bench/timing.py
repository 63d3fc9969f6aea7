"""Time a call: median and spread over repeats, on the device's own clock where it has one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SAMPLE_MS = 20.0
"""How long one sample lasts at least on a GPU."""
MOST_CALLS = 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Summarise samples."""
        return cls(statistics.median(samples), min(samples), max(samples))

    def __add__(self, other: Timing) -> Timing:
        """Time of two calls, one after the other."""
        return Timing(self.median + other.median, self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def measure(
    call: Callable[[], object], device: torch.device, repeats: int, warmup: int = 2
) -> Timing:
    """Time ``call`` ``repeats`` times after ``warmup`` calls that do not count.

    Short calls are repeated inside a sample, so that a GPU's queue stays filled as it does in a step.
    """
    for _ in range(warmup):
        call()
    inner = 1
    if device.type == "cuda":
        inner = min(MOST_CALLS, int(SAMPLE_MS / max(_once(call, device, 1), 1e-3)) + 1)
    return Timing.of([_once(call, device, inner) / inner for _ in range(repeats)])


def _once(call: Callable[[], object], device: torch.device, inner: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(inner):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))

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
    clock = Clock(device)
    clock.synchronize()
    begin = clock.mark()
    for _ in range(inner):
        call()
    end = clock.mark()
    clock.synchronize()
    return clock.between(begin, end)


class Clock:
    """Marks in a device's queue, or on the host's clock where the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event | float:
        """Note the moment at which the device comes here."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Milliseconds between two marks, after `synchronize`."""
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(begin.elapsed_time(end))
        assert isinstance(begin, float), "both marks are of one clock"
        assert isinstance(end, float), "both marks are of one clock"
        return (end - begin) * 1e3

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

"""One rank's forward and backward, timed together: time, bytes sent, peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .timing import MOST_CALLS, SAMPLE_MS, Clock, Timing

WARM_UP = 3
"""Calls that do not count."""
WARM_UP_S = 12.0
"""No further one after so many seconds, those of the first one apart: it compiles kernels."""
SETTLED_S = 2.0
"""On a GPU not fewer: it clocks higher as long as it is cool."""


class Work(Protocol):
    """What one rank does in a step; inputs exist, and each forward builds a graph of its own."""

    device: torch.device

    def forward(self) -> list[Tensor]:
        """Run and return every output."""

    def backward(self, outs: list[Tensor]) -> None:
        """Run the backward of `forward`; its gradients are dropped as soon as they are made."""

    def sent_bytes(self) -> int:
        """Bytes handed to other ranks since the last call."""


@dataclass(frozen=True)
class Measured:
    """One rank's figures."""

    forward: Timing
    backward: Timing
    total: Timing
    sent_forward: int
    """Bytes this rank sends in one forward."""
    sent_backward: int
    forward_peak_bytes: int | None
    """Most memory held in one forward, inputs included; None where no device counts it."""
    peak_bytes: int | None
    """Likewise in one forward and backward."""


class Consumed(torch.autograd.Function):
    """Identity whose backward drops the gradient, as a projection does once it has used it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Pass ``x`` on."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Drop it."""


def consumed(x: Tensor) -> Tensor:
    """Stand for a projection's output: it needs a gradient, which nobody keeps."""
    if not torch.is_grad_enabled():
        return x
    out: Tensor = Consumed.apply(x.requires_grad_())  # type: ignore[no-untyped-call]
    return out


def measure_work(
    make: Callable[[], Work], device: torch.device, repeats: int, *, budget_s: float,
    uncounted_bytes: Callable[[Any], int] = lambda work: 0,
    agree: Callable[[float], float] = lambda seconds: seconds,
) -> Measured:  # fmt: skip
    """Build, warm up and time one rank's work.

    Forwards and backwards follow each other without a wait, so that a GPU's queue stays filled; marks
    between them tell their times apart. Only one call is timed when it alone takes the budget.

    Args:
        make: builds the work.
        device: where it runs.
        repeats: timed calls; more of them when they are short, fewer when they exceed the budget.
        budget_s: seconds for the timed calls.
        uncounted_bytes: of the work's memory that only the benchmark needs.
        agree: makes one number of all ranks', where several run at once: they must call equally often.
    """
    gc.collect()
    counts = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if counts else 0
    work = make()
    seconds, sent, peaks = _warm_up(work, agree)
    if counts and seconds * 1e3 < SAMPLE_MS:
        repeats = max(repeats, min(MOST_CALLS, int(SAMPLE_MS / (seconds * 1e3)) + 1))
    # one more, because the first starts on an empty queue
    calls = max(1, min(repeats + 1, int(budget_s / max(seconds, 1e-9))))
    samples = _timed(work, calls)
    forward, backward, total = (Timing.of([s[i] for s in samples]) for i in range(3))
    if not counts:
        return Measured(forward, backward, total, *sent, None, None)
    rest = before + uncounted_bytes(work)
    return Measured(forward, backward, total, *sent, *(peak - rest for peak in peaks))


def _warm_up(
    work: Work, agree: Callable[[float], float]
) -> tuple[float, tuple[int, int], tuple[int, int]]:
    """Call until kernels and graphs exist; seconds, bytes sent and peaks of memory of the last call.

    Bytes are those of forward and backward, peaks those of the forward and of both, 0 where no device counts them.
    """
    counts = work.device.type == "cuda"
    work.sent_bytes()
    least = SETTLED_S if counts else 0.0
    total, calls = 0.0, 0
    while (calls < WARM_UP or total < least) and total <= WARM_UP_S:
        start = time.perf_counter()
        if counts:
            torch.cuda.reset_peak_memory_stats(work.device)
        outs = work.forward()
        forward, forward_peak = work.sent_bytes(), _peak(work.device)
        work.backward(outs)
        backward, peak = work.sent_bytes(), _peak(work.device)
        Clock(work.device).synchronize()
        seconds = agree(time.perf_counter() - start)
        del outs
        total += seconds if calls else 0.0
        calls += 1
    return seconds, (forward, backward), (forward_peak, peak)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _timed(work: Work, calls: int) -> list[tuple[float, float, float]]:
    clock = Clock(work.device)
    clock.synchronize()
    marks = []
    for _ in range(calls):
        begin = clock.mark()
        outs = work.forward()
        middle = clock.mark()
        work.backward(outs)
        del outs
        marks.append((begin, middle, clock.mark()))
    clock.synchronize()
    between = clock.between
    samples = [(between(b, m), between(m, e), between(b, e)) for b, m, e in marks]
    return samples[1:] if len(samples) > 2 else samples

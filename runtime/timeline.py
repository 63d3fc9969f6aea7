"""What each rank does when, in one step: spans of compute, schedule P2P, taps and waits.

Nothing is recorded, and a span costs one look-up, unless `recording` is active in the thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

KINDS = ("forward", "backward", "weights", "draft", "send", "receive", "push", "credit", "stamp")
"""Compute: the first four. P2P of the schedule: send and wait. Taps: push, wait for a slot, wait for taps."""


class Span(NamedTuple):
    """One thing that one rank did; spans of a rank nest."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    """Seconds since the recording began."""
    end: float


class Recorder:
    """Collects spans of one rank.

    On CUDA times are those at which the current stream came there, so a wait on the host shows as the
    gap that it leaves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, int, int, Any, Any]] = []
        self._begin = self._now()

    @contextlib.contextmanager
    def span(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Record what happens inside."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((kind, stage, micro_batch, start, self._now()))

    def spans(self) -> list[Span]:
        """All spans, outer ones first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = [Span(k, s, m, self._at(a), self._at(b)) for k, s, m, a, b in self._spans]
        return sorted(found, key=lambda span: (span.start, -span.end))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return float(mark - self._begin)
        return float(self._begin.elapsed_time(mark)) / 1e3


class _OfThread(threading.local):
    recorder: Recorder | None = None


_local = _OfThread()
_nothing: AbstractContextManager[None] = contextlib.nullcontext()


def span(kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
    """Record what happens inside, where this thread records."""
    recorder = _local.recorder
    return _nothing if recorder is None else recorder.span(kind, stage, micro_batch)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let `span` of this thread record."""
    previous = _local.recorder
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = previous

"""Cuts rows into blocks that need no mask, a causal one, or a small dense one."""

from __future__ import annotations

import numpy as np

from .runs import CAUSAL, SAME, WINDOW, Array, Block, Mask, find_runs

CALL_COST = 2048
"""Fixed cost of one kernel call, in scores: what starting it costs on a CPU, as measured."""
WINDOW_ROWS = 128
"""Rows of one block of a sliding window."""


def cut_masked(low: Array, high: Array) -> tuple[list[Block], list[Mask], int]:
    """Return (blocks, their masks, number of layers)."""
    builder = _Builder(low, high)
    for start, stop, relation in find_runs(low, high):
        builder.add(start, stop, relation)
    builder.flush()
    layers = 1 + max((block.layer for block in builder.blocks), default=-1)
    return builder.blocks, builder.masks, layers


class _Builder:
    """Turns runs into blocks; joins neighbours under one dense mask where that is cheaper."""

    def __init__(self, low: Array, high: Array) -> None:
        self.low, self.high = low, high
        self.blocks: list[Block] = []
        self.masks: list[Mask] = []
        self._mask_ids: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._pending: tuple[int, int, int | None, float] | None = None

    def add(self, start: int, stop: int, relation: int) -> None:
        """Take the next run of rows."""
        if relation == WINDOW and stop - start > WINDOW_ROWS:
            for row in range(start, stop, WINDOW_ROWS):
                self.add(row, min(row + WINDOW_ROWS, stop), relation)
            return
        cost = self._cost(start, stop, relation)
        if self._pending is not None:
            first, _, _, pending_cost = self._pending
            joined = self._cost(first, stop, None)
            if joined <= pending_cost + cost:
                self._pending = (first, stop, None, joined)
                return
            self.flush()
        self._pending = (start, stop, relation, cost)

    def flush(self) -> None:
        """Emit the blocks of the pending rows."""
        if self._pending is None:
            return
        start, stop, relation, _ = self._pending
        self._pending = None
        low, high = int(self.low[start]), int(self.high[start])
        if relation == SAME or stop - start == 1:
            self._emit(start, stop, [(low, high, False)])
        elif relation == CAUSAL:
            # the first row sees the last of the keys common to all rows: the square starts there
            zones = [(high - 1, high - 1 + stop - start, True)]
            self._emit(start, stop, [*zones, (low, high - 1, False)])
        else:
            self._emit(start, stop, [(*zone, False) for zone in self._zones(start, stop)])

    def _cost(self, start: int, stop: int, relation: int | None) -> float:
        rows, width = stop - start, int(self.high[start] - self.low[start])
        if relation == SAME:
            return CALL_COST + rows * width
        if relation == CAUSAL:
            return (1 + (width > 1)) * CALL_COST + rows * (width - 1) + rows * rows / 2
        zones = self._zones(start, stop)
        # a dense mask doubles the cost of a score
        weight = [1 if self._common(start, stop) == zone else 2 for zone in zones]
        return sum(CALL_COST + w * rows * (b - a) for w, (a, b) in zip(weight, zones, strict=True))

    def _common(self, start: int, stop: int) -> tuple[int, int]:
        return int(self.low[start:stop].max()), int(self.high[start:stop].min())

    def _zones(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Key ranges of one chunk: those that all rows see apart from the rest, if that pays."""
        low, high = self.low[start:stop], self.high[start:stop]
        live = high > low
        first, last = int(low[live].min()), int(high[live].max())
        begin, end = self._common(start, stop)
        if not live.all() or (stop - start) * (end - begin) <= 2 * CALL_COST:
            return [(first, last)]
        return [(a, b) for a, b in ((begin, end), (first, begin), (end, last)) if a < b]

    def _emit(self, start: int, stop: int, zones: list[tuple[int, int, bool]]) -> None:
        layer = 0
        for begin, end, causal in zones:
            if begin >= end:
                continue
            mask = None if causal else self._mask(start, stop, begin, end)
            self.blocks.append(Block(start, stop, begin, end, causal, mask, layer))
            layer += 1

    def _mask(self, start: int, stop: int, begin: int, end: int) -> int | None:
        low, high = self.low[start:stop, None], self.high[start:stop, None]
        if (low <= begin).all() and (high >= end).all():
            return None
        key = np.arange(begin, end)
        mask = (key >= low) & (key < high)
        name = (mask.shape, mask.tobytes())
        if name not in self._mask_ids:
            self._mask_ids[name] = len(self.masks)
            self.masks.append(mask)
        return self._mask_ids[name]

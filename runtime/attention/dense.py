"""Takes large dense blocks out of the rows' intervals; what is left of each row is an interval again."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from .intervals import Intervals
from .runs import BREAK, CAUSAL, SAME, Array, Block, find_runs

LEAST_SCORES = 1 << 23
"""Scores of the smallest dense block, a head. Below, a fast kernel's gain does not pay for a graph of
its own (on one H200 some 0.1 s, once for each pair of lengths) and for one more partial."""
STAIR_ROWS = 1024
"""Rows of a dense block under a staircase: what it leaves grows with them, the number of blocks shrinks."""
SHORT_ROWS = 128
"""Longest run that becomes a step of a staircase."""
STAIR = -1
"""How a joined run goes on, beside the relations of `find_runs`."""
LEADING_BITS = 5
"""Lengths of dense blocks keep this many leading bits: at most 16 different ones between powers of two."""

Length = TypeVar("Length", int, Array)


def cut_dense(low: Array, high: Array, num_keys: int) -> tuple[list[Block], Intervals | None, int]:
    """Return (blocks, what they leave or None, number of layers); the rest is layer 0 if there is one."""
    given_low, given_high = low, high
    low, high = low.copy(), high.copy()
    squares: list[Block] = []
    oblongs: list[Block] = []
    for start, stop, relation in _joined(find_runs(low, high), given_low, given_high):
        common = int(given_high[start])
        if relation == CAUSAL:
            common -= 1
            square = _square(start, stop, common)
            if square is not None:
                squares.append(square)
                high[square.q0 : square.q1] = square.k0
        elif relation not in (SAME, STAIR):
            continue
        oblong = _oblong(start, stop, int(given_low[start]), common)
        if oblong is not None:
            oblongs.append(oblong)
            low[oblong.q0 : oblong.q1] = oblong.k1
    rest = Intervals(low, high, num_keys) if np.any(high > low) else None
    layer = 0 if rest is None else 1
    blocks = [_on_layer(block, layer) for block in squares]
    layer += bool(squares)
    blocks += [_on_layer(block, layer) for block in oblongs]
    return blocks, rest, layer + bool(oblongs)


def _joined(
    runs: list[tuple[int, int, int]], low: Array, high: Array
) -> list[tuple[int, int, int]]:
    """Join short neighbouring runs from one first key on, with ever more keys, to staircases of `STAIR_ROWS`."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, relation in runs:
        first, end, before = joined[-1] if joined else (0, -1, BREAK)
        short = stop - start <= SHORT_ROWS and (before == STAIR or end - first <= SHORT_ROWS)
        rising = end == start and low[first] == low[start] and high[start - 1] <= high[start]
        known = {before, relation} <= {SAME, CAUSAL, STAIR}
        if short and rising and known and stop - first <= STAIR_ROWS:
            joined[-1] = (first, stop, STAIR)
        else:
            joined.append((start, stop, relation))
    return joined


def friendly(length: Length) -> Length:
    """The longest length up to this one that is in the small set; also of each of an array."""
    if isinstance(length, int):
        shift = max(0, length.bit_length() - LEADING_BITS)
        return length >> shift << shift
    shifts: Array = np.maximum(0, np.frexp(length)[1] - LEADING_BITS).astype(np.int64)
    return length >> shifts << shifts


def _square(start: int, stop: int, first_key: int) -> Block | None:
    rows = friendly(stop - start)
    if rows * rows // 2 < LEAST_SCORES:
        return None
    return Block(start, start + rows, first_key, first_key + rows, causal=True)


def _oblong(start: int, stop: int, low: int, end: int) -> Block | None:
    rows, keys = friendly(stop - start), friendly(max(0, end - low))
    if rows * keys < LEAST_SCORES:
        return None
    return Block(start, start + rows, low, low + keys)


def _on_layer(block: Block, layer: int) -> Block:
    return Block(block.q0, block.q1, block.k0, block.k1, block.causal, None, layer)

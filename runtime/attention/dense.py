"""Takes large dense blocks out of the rows' intervals; what is left of each row is an interval again."""

from __future__ import annotations

import numpy as np

from .intervals import Intervals
from .runs import CAUSAL, SAME, Array, Block, find_runs

LEAST_SCORES = 1 << 25
"""Scores of the smallest dense block, a head. Below, a fast kernel's gain does not pay for a graph of
its own: on one H200 some 0.1 s, once for each pair of lengths."""
LEADING_BITS = 5
"""Lengths of dense blocks keep this many leading bits: at most 16 different ones between powers of two."""


def cut_dense(low: Array, high: Array, num_keys: int) -> tuple[list[Block], Intervals | None, int]:
    """Return (blocks, what they leave or None, number of layers); the rest is layer 0 if there is one."""
    low, high = low.copy(), high.copy()
    squares: list[Block] = []
    oblongs: list[Block] = []
    for start, stop, relation in find_runs(low, high):
        if relation == CAUSAL:
            square = _square(start, stop, int(high[start]) - 1)
            common = int(high[start]) - 1
        else:
            square, common = None, int(high[start])
        if relation not in (SAME, CAUSAL):
            continue
        oblong = _oblong(start, stop, int(low[start]), common)
        if square is not None:
            squares.append(square)
            high[square.q0 : square.q1] = square.k0
        if oblong is not None:
            oblongs.append(oblong)
            low[oblong.q0 : oblong.q1] = oblong.k1
    rest = Intervals(low, high, num_keys) if np.any(high > low) else None
    layer = 0 if rest is None else 1
    blocks = [_on_layer(block, layer) for block in squares]
    layer += bool(squares)
    blocks += [_on_layer(block, layer) for block in oblongs]
    return blocks, rest, layer + bool(oblongs)


def friendly(length: int) -> int:
    """The longest length up to this one that is in the small set."""
    shift = max(0, length.bit_length() - LEADING_BITS)
    return length >> shift << shift


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

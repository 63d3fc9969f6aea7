"""Which sorted keys each row sees, and the runs of rows whose intervals move in one way.

Sorted by (group, index), the keys that one query row sees are an interval: the keys of its document
between two limits.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SAME, CAUSAL, WINDOW, BREAK = range(4)
"""How a row's interval follows from the row before."""


@dataclass(frozen=True)
class Block:
    """Query rows ``q0:q1`` against (sorted) keys ``k0:k1``."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    """Square and aligned: row i sees keys up to i."""
    mask: int | None = None
    """Index into the plan's masks; None: nothing to mask besides ``causal``."""
    layer: int = 0
    """Blocks of one layer share no query row."""


def find_intervals(
    q_group: Array, q_low: Array, q_high: Array, k_group: Array, k_index: Array
) -> tuple[Array | None, Array, Array]:
    """The sorting permutation, and for every row the half-open interval of sorted keys it sees."""
    groups = np.unique(k_group)
    span = int(k_index.max(initial=0)) + 1
    code = np.searchsorted(groups, k_group) * (span + 1) + k_index
    order: Array | None = None
    if np.any(np.diff(code) < 0):
        order = np.argsort(code, kind="stable")
        code = code[order]
    rank = np.searchsorted(groups, q_group)
    known = rank < len(groups)
    known[known] = groups[rank[known]] == q_group[known]
    low = np.searchsorted(code, rank * (span + 1) + np.clip(q_low, 0, span))
    high = np.searchsorted(code, rank * (span + 1) + np.clip(q_high, 0, span))
    high = np.where(known, np.maximum(high, low), low)
    if order is not None:
        # gathered anyway: only what any row sees
        seen = np.zeros(len(order) + 1, dtype=np.int64)
        live = high > low
        np.add.at(seen, low[live], 1)
        np.add.at(seen, high[live], -1)
        used = np.cumsum(seen[:-1]) > 0
        number = np.append(0, np.cumsum(used))
        order, low, high = order[used], number[low], number[high]
    return order, low.astype(np.int64), high.astype(np.int64)


def find_runs(low: Array, high: Array) -> list[tuple[int, int, int]]:
    """Maximal runs of seeing rows whose intervals move in one way: (start, stop, relation)."""
    live = high > low
    step_low, step_high = np.diff(low), np.diff(high)
    relation = np.full(max(len(low) - 1, 0), BREAK)
    relation[(step_low == 0) & (step_high == 0)] = SAME
    relation[(step_low == 0) & (step_high == 1)] = CAUSAL
    relation[(step_low == 1) & (step_high == 1)] = WINDOW
    relation[~(live[:-1] & live[1:])] = BREAK
    changes = [*(np.flatnonzero(np.diff(relation)) + 1).tolist(), len(relation)]
    # a step of the loop is a run, never a row that sees nothing: those can be nearly all rows
    seeing, kinds = np.flatnonzero(live).tolist(), [*relation.tolist(), BREAK]
    runs = []
    at = 0
    while at < len(seeing):
        row = last = seeing[at]
        kind = kinds[row]
        if kind == BREAK:
            kind = SAME
        else:
            last = changes[bisect.bisect_right(changes, row)]
        runs.append((row, last + 1, kind))
        at = bisect.bisect_right(seeing, last, at)
    return runs

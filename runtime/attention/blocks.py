"""Cuts attention into blocks that need no mask, a causal one, or a small dense one.

Sorted by (group, index), the keys that one query row sees are an interval: the keys of its document
between two limits. A block plan is made from these intervals alone, on the host, once for given index
vectors; it then serves every layer and both directions.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CALL_COST = 2048
"""Fixed cost of one kernel call, in scores: what starting it costs on a CPU, as measured."""
WINDOW_ROWS = 128
"""Rows of one block of a sliding window."""
CACHED_PLANS = 128

_SAME, _CAUSAL, _WINDOW, _BREAK = range(4)


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


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of one set of index vectors."""

    num_rows: int
    num_keys: int
    order: Array | None
    """Permutation that sorts the keys; None: they are sorted already."""
    blocks: tuple[Block, ...]
    masks: tuple[Mask, ...]
    num_layers: int
    _additive: dict[tuple[torch.dtype, torch.device], list[Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _orders: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def additive_mask(self, block: Block, like: Tensor) -> Tensor | None:
        """The block's mask as 0 / -inf in the dtype and on the device of ``like``."""
        if block.mask is None:
            return None
        key = (like.dtype, like.device)
        if key not in self._additive:
            self._additive[key] = [
                torch.zeros(mask.shape, dtype=like.dtype)
                .masked_fill_(torch.from_numpy(~mask), -math.inf)
                .to(like.device)
                for mask in self.masks
            ]
        return self._additive[key][block.mask]

    def order_on(self, device: torch.device) -> Tensor | None:
        """``order`` as a tensor."""
        if self.order is None:
            return None
        if device not in self._orders:
            self._orders[device] = torch.from_numpy(self.order).to(device)
        return self._orders[device]

    @property
    def num_scores(self) -> int:
        """Scores that the blocks compute, a head."""
        return sum((b.q1 - b.q0) * (b.k1 - b.k0) for b in self.blocks)


def plan_blocks(
    q_group: Array, q_low: Array, q_high: Array, k_group: Array, k_index: Array
) -> BlockPlan:
    """Plan: key j is visible to row r iff the groups agree and ``q_low[r] <= k_index[j] < q_high[r]``.

    Args:
        q_group: [R].
        q_low: [R].
        q_high: [R].
        k_group: [S].
        k_index: [S], not negative.
    """
    order, low, high = _intervals(q_group, q_low, q_high, k_group, k_index)
    builder = _Builder(low, high)
    for start, stop, relation in _runs(low, high):
        builder.add(start, stop, relation)
    builder.flush()
    layers = 1 + max((block.layer for block in builder.blocks), default=-1)
    return BlockPlan(
        len(q_group), len(k_group), order, tuple(builder.blocks), tuple(builder.masks), layers
    )


def cached_plan(
    q_group: Array, q_low: Array, q_high: Array, k_group: Array, k_index: Array
) -> BlockPlan:
    """`plan_blocks`, remembered by the contents of the index vectors."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (q_group, q_low, q_high, k_group, k_index):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    key = digest.digest()
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    plan = plan_blocks(q_group, q_low, q_high, k_group, k_index)
    with _lock:
        _plans[key] = plan
        while len(_plans) > CACHED_PLANS:
            _plans.popitem(last=False)
    return plan


_plans: OrderedDict[bytes, BlockPlan] = OrderedDict()
_lock = threading.Lock()


def _intervals(
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
    return order, low.astype(np.int64), high.astype(np.int64)


def _runs(low: Array, high: Array) -> list[tuple[int, int, int]]:
    """Maximal runs of seeing rows whose intervals move in one way: (start, stop, relation)."""
    live = high > low
    step_low, step_high = np.diff(low), np.diff(high)
    relation = np.full(max(len(low) - 1, 0), _BREAK)
    relation[(step_low == 0) & (step_high == 0)] = _SAME
    relation[(step_low == 0) & (step_high == 1)] = _CAUSAL
    relation[(step_low == 1) & (step_high == 1)] = _WINDOW
    relation[~(live[:-1] & live[1:])] = _BREAK
    changes = np.append(np.flatnonzero(np.diff(relation)) + 1, len(relation))
    runs = []
    row = 0
    while row < len(low):
        kind, last = _SAME, row
        if row < len(relation) and relation[row] != _BREAK:
            kind = int(relation[row])
            last = int(changes[np.searchsorted(changes, row, side="right")])
        if live[row]:
            runs.append((row, last + 1, kind))
        row = last + 1
    return runs


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
        if relation == _WINDOW and stop - start > WINDOW_ROWS:
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
        if relation == _SAME or stop - start == 1:
            self._emit(start, stop, [(low, high, False)])
        elif relation == _CAUSAL:
            # the first row sees the last of the keys common to all rows: the square starts there
            zones = [(high - 1, high - 1 + stop - start, True)]
            self._emit(start, stop, [*zones, (low, high - 1, False)])
        else:
            self._emit(start, stop, [(*zone, False) for zone in self._zones(start, stop)])

    def _cost(self, start: int, stop: int, relation: int | None) -> float:
        rows, width = stop - start, int(self.high[start] - self.low[start])
        if relation == _SAME:
            return CALL_COST + rows * width
        if relation == _CAUSAL:
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

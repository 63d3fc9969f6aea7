"""Cuts rows that each see an interval of keys into tiles for the generated attention kernels.

The lists are made on the host from the intervals alone; they name every tile of work once, so that the
kernels never start on an empty one and mask only where an edge passes.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spec_compile.codegen.attention import KeyLists, RowIntervals

Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

TILE_COST = 128
"""Fixed cost of one tile of rows, in keys."""


@dataclass(frozen=True, eq=False)
class Intervals:
    """Row r sees the keys ``low[r] <= j < high[r]``; its lists are made once for each tile size."""

    low: Array
    """[R]."""
    high: Array
    """[R]; equal to ``low`` where the row sees nothing."""
    num_keys: int
    _made: dict[tuple[object, ...], object] = field(default_factory=dict, repr=False)

    @property
    def num_scores(self) -> int:
        """Visible pairs of rows and keys."""
        return int((self.high - self.low).sum())

    def vectors(self, device: torch.device) -> RowIntervals:
        """``low`` and ``high`` for the kernels."""
        key = ("vectors", device)
        if key not in self._made:
            self._made[key] = RowIntervals(_int32(self.low, device), _int32(self.high, device))
        return self._made[key]  # type: ignore[return-value]

    @functools.cached_property
    def blind_share(self) -> float:
        """Share of the rows that see nothing."""
        return float(np.mean(self.high == self.low)) if len(self.low) else 0.0

    @functools.cached_property
    def seen(self) -> Mask:
        """[num_keys], whether some row sees the key."""
        live = self.high > self.low
        begun, ended = (
            np.bincount(x[live], minlength=self.num_keys + 1) for x in (self.low, self.high)
        )
        found: Mask = np.cumsum(begun - ended)[:-1] > 0
        return found

    @functools.cached_property
    def seen_share(self) -> float:
        """Share of the keys that some row sees."""
        return float(self.seen.mean()) if self.num_keys else 0.0

    def row_tiles(self, rows: int, keys: int, device: torch.device, *, every_row: bool) -> Tensor:
        """Tiles of at most ``rows`` rows, widest first; see `launch_forward`.

        Tiles that see no key are left out unless ``every_row`` is to be written.
        """
        key = ("rows", rows, keys, device, every_row)
        if key not in self._made:
            tiles = self._row_tiles(rows, keys)
            if not every_row:
                tiles = tiles[tiles[:, 5] > tiles[:, 2]]
            order = np.argsort(tiles[:, 2] - tiles[:, 5], kind="stable")
            self._made[key] = _int32(tiles[order], device)
        return self._made[key]  # type: ignore[return-value]

    def key_lists(self, rows: int, keys: int, device: torch.device, *, every_key: bool) -> KeyLists:
        """For tiles of ``keys`` keys the rows that see some of each, most rows first.

        Tiles that no row sees are left out unless ``every_key`` is to be written.
        """
        key = ("keys", rows, keys, device, every_key)
        if key not in self._made:
            tiles, items = _key_lists(self, self._row_tiles(rows, keys), rows, keys)
            if not every_key:
                some = np.logical_or.reduceat(self.seen, np.arange(0, self.num_keys, keys))
                tiles = tiles[some[tiles[:, 0] // keys]]
            self._made[key] = KeyLists(_int32(tiles, device), _int32(items, device))
        return self._made[key]  # type: ignore[return-value]

    def _row_tiles(self, rows: int, keys: int) -> Array:
        starts = _cut_rows(self.low, self.high, rows)
        if len(starts) == 0:
            return np.zeros((0, 6), dtype=np.int64)
        live = self.high > self.low
        reduce = functools.partial(_reduce, starts)
        first = reduce(np.minimum, np.where(live, self.low, self.num_keys))
        last = reduce(np.maximum, np.where(live, self.high, 0))
        first = np.minimum(first, last)
        common, common_end = reduce(np.maximum, self.low), reduce(np.minimum, self.high)
        full = first + -(-(common - first) // keys) * keys
        full_end = full + np.maximum(common_end - full, 0) // keys * keys
        none = full_end <= full
        full, full_end = np.where(none, last, full), np.where(none, last, full_end)
        ends = np.append(starts[1:], len(self.low))
        return np.stack([starts, ends, first, full, full_end, last], 1)


def _reduce(starts: Array, ufunc: np.ufunc, values: Array) -> Array:
    result: Array = ufunc.reduceat(values, starts)
    return result


def _cut_rows(low: Array, high: Array, rows: int) -> Array:
    """First rows of the tiles: neighbours share one where the keys between them cost less than a second."""
    if len(low) == 0:
        return np.zeros(0, dtype=np.int64)
    steps = (np.diff(low), np.diff(high))
    smooth = ((steps[0] == 0) | (steps[0] == 1)) & ((steps[1] == 0) | (steps[1] == 1))
    pieces = np.append(np.append(0, np.flatnonzero(~smooth) + 1), len(low)).tolist()
    starts: list[int] = []
    begin, seen = 0, (0, 0)
    for start, stop in itertools.pairwise(pieces):
        row = start
        if starts:
            # fill up the open tile with the head of this piece, if that is cheaper than a new tile
            take = min(stop, begin + rows)
            piece = _hull(low, high, row, take)
            joined = _join(seen, piece)
            cost = _width(seen) + _width(piece) + TILE_COST
            if take > row and _width(joined) <= cost:
                seen, row = joined, take
        while row < stop:
            starts.append(row)
            begin = row
            row = min(stop, row + rows)
            seen = _hull(low, high, begin, row)
    return np.asarray(starts, dtype=np.int64)


def _hull(low: Array, high: Array, start: int, stop: int) -> tuple[int, int]:
    """Keys that rows of one piece see; inside a piece both limits only rise."""
    return (int(low[start]), int(high[stop - 1])) if stop > start else (0, 0)


def _width(hull: tuple[int, int]) -> int:
    return max(0, hull[1] - hull[0])


def _join(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    if _width(a) == 0 or _width(b) == 0:
        return a if _width(a) else b
    return min(a[0], b[0]), max(a[1], b[1])


def _key_lists(intervals: Intervals, row_tiles: Array, rows: int, keys: int) -> tuple[Array, Array]:
    """Tiles [n, 5] and items [m, 2] of `KeyLists`."""
    live = row_tiles[row_tiles[:, 5] > row_tiles[:, 2]]
    starts, ends, first, last = live[:, 0], live[:, 1], live[:, 2] // keys, -(-live[:, 5] // keys)
    count = last - first
    which = np.repeat(np.arange(len(live)), count)
    tile = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[which]
    order = np.lexsort((which, tile))
    tile, which = tile[order], which[order]
    free = _sees_all(intervals, starts, ends, which, tile, rows, keys)
    num_tiles = -(-intervals.num_keys // keys)
    in_run, run, run_end = _longest_runs(tile, starts[which], free, rows, num_tiles)
    end = np.cumsum(np.bincount(tile[~in_run], minlength=num_tiles))
    begin = np.append(0, end[:-1])[:num_tiles]
    tiles = np.stack([np.arange(num_tiles) * keys, begin, end, run, run_end], 1)
    busiest = np.argsort((begin - end) * rows + run - run_end, kind="stable")
    listed = which[~in_run]
    return tiles[busiest], np.stack([starts[listed], ends[listed]], 1)


def _sees_all(
    intervals: Intervals, starts: Array, ends: Array, which: Array, tile: Array, rows: int, keys: int
) -> Mask:  # fmt: skip
    """For every pair of tiles whether the rows fill theirs and all see all of the keys."""
    low, high = intervals.low, intervals.high
    spans = list(zip(starts, ends, strict=True))
    common = np.array([low[a:b].max() for a, b in spans], dtype=np.int64)
    common_end = np.array([high[a:b].min() for a, b in spans], dtype=np.int64)
    whole = (ends - starts == rows)[which]
    free: Mask = whole & (tile * keys >= common[which]) & ((tile + 1) * keys <= common_end[which])
    return free


def _longest_runs(
    tile: Array, start: Array, free: Mask, rows: int, num_tiles: int
) -> tuple[Mask, Array, Array]:
    """For each tile of keys the longest run of neighbouring free tiles of rows.

    Returns:
        Which pairs are in one; first and end row of each tile's run, both 0 where there is none.
    """
    first, end = np.zeros(num_tiles, dtype=np.int64), np.zeros(num_tiles, dtype=np.int64)
    if not free.any():
        return free, first, end
    next_to = free[1:] & free[:-1] & (tile[1:] == tile[:-1]) & (start[1:] == start[:-1] + rows)
    run = np.append(0, np.cumsum(~next_to))
    length = np.bincount(run, weights=free).astype(np.int64)
    head = np.append(0, np.flatnonzero(~next_to) + 1)
    # in every tile of keys the longest run comes last, and so is the one that stays
    order = np.argsort(length, kind="stable")
    chosen = np.full(num_tiles, -1, dtype=np.int64)
    chosen[tile[head[order]]] = order
    chosen[(chosen >= 0) & (length[chosen] == 0)] = -1
    has = chosen >= 0
    first[has] = start[head[chosen[has]]]
    end[has] = first[has] + rows * length[chosen[has]]
    return free & (chosen[tile] == run), first, end


def _int32(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)

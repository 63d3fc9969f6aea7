"""Which context-parallel rank computes which rows of each document: few pieces, even work, equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .kernel_cost import PAIRS, KernelCost

WORK_TOLERANCE = 1.01
"""Rows are traded until the busiest rank has at most this multiple of the mean work."""
TILE_ROWS = 128
"""Rows that a kernel computes at once. Trades move whole tiles where they can, as a cut inside one leaves
half of it idle on both ranks, on average."""
OVERSHOOT = 1.5
"""How much more work than asked for a trade may move to come to whole tiles; half as much is enough."""
MOST_PIECES = 48
"""Longest pieces of a rank that a trade looks at."""
MOST_IDLE = 8
"""Ranks with least work that the busiest tries to trade with."""

Numbers = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """Neighbouring rows of one document."""

    document: int
    low: int
    """Position of the first row."""
    high: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.high - self.low


class Ranks:
    """The pieces of every rank.

    Args:
        cp: ranks.
        capacity: rows that each can take.
        kernels: what a piece costs; the sum over its pieces is the work of a rank.
    """

    def __init__(self, cp: int, capacity: int, kernels: KernelCost = PAIRS) -> None:
        self.kernels = kernels
        self.pieces: list[list[Piece]] = [[] for _ in range(cp)]
        self.room = [capacity] * cp
        self.work = [0] * cp

    def work_of(self, piece: Piece) -> int:
        """Of one piece."""
        return self.kernels.of(piece.low, piece.high)

    def put(self, rank: int, piece: Piece) -> None:
        """Give a piece to a rank, also beyond its room."""
        if piece.rows > 0:
            self.pieces[rank].append(piece)
            self.room[rank] -= piece.rows
            self.work[rank] += self.work_of(piece)

    def replace(self, rank: int, pieces: Sequence[Piece]) -> None:
        """Give a rank other pieces of as many rows."""
        self.pieces[rank] = _joined(pieces)
        self.work[rank] = sum(map(self.work_of, self.pieces[rank]))

    def counted(self, kernels: KernelCost) -> Ranks:
        """The same pieces at other costs."""
        other = Ranks(len(self.pieces), 0, kernels)
        other.room = list(self.room)
        for rank, pieces in enumerate(self.pieces):
            other.replace(rank, pieces)
        return other

    @property
    def costs(self) -> list[int]:
        """Work of each rank, and half a tile at both ends of each of its pieces."""
        half = self.kernels.factor * TILE_ROWS // 2
        return [
            work + half * sum(piece.low + piece.high for piece in pieces)
            for work, pieces in zip(self.work, self.pieces, strict=True)
        ]


def place(
    sizes: Sequence[int], num_long: int, cp: int, capacity: int, *,
    kernels: KernelCost = PAIRS,
) -> Ranks:  # fmt: skip
    """Zigzag the longest documents, and keep the others whole.

    A zigzagged document is cut into 2 * cp nearly equal chunks, rank r takes chunks r and 2 * cp - 1 - r.
    Each other one goes to the rank with the least work that still has room, or is cut where none has.

    Args:
        sizes: rows of each document.
        num_long: how many are zigzagged.
        cp: ranks.
        capacity: rows of a rank; together they are enough for all.
        kernels: what pieces cost.
    """
    ranks = Ranks(cp, capacity, kernels)
    order = [int(i) for i in np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable")]
    for document in order[:num_long]:
        cuts = [i * sizes[document] // (2 * cp) for i in range(2 * cp + 1)]
        for chunk in range(2 * cp):
            piece = Piece(document, cuts[chunk], cuts[chunk + 1])
            ranks.put(min(chunk, 2 * cp - 1 - chunk), piece)
    _give_away(ranks)
    for document in order[num_long:]:
        roomy = [rank for rank in range(cp) if ranks.room[rank] >= sizes[document]]
        if roomy:
            rank = min(roomy, key=lambda rank: (ranks.work[rank], rank))
            ranks.put(rank, Piece(document, 0, sizes[document]))
        else:
            _cut(document, sizes[document], ranks)
    for rank, pieces in enumerate(ranks.pieces):
        ranks.replace(rank, pieces)
    return ranks


def _give_away(ranks: Ranks) -> None:
    """Move last rows of long pieces from ranks with too many rows to ranks with room."""
    while min(ranks.room) < 0:
        giver = min(range(len(ranks.room)), key=ranks.room.__getitem__)
        taker = max(range(len(ranks.room)), key=ranks.room.__getitem__)
        longest = max(ranks.pieces[giver], key=lambda piece: piece.rows)
        middle = longest.high - min(-ranks.room[giver], ranks.room[taker], longest.rows)
        moved = longest._replace(low=middle)
        ranks.pieces[giver].remove(longest)
        ranks.room[giver] += longest.rows
        ranks.work[giver] -= ranks.work_of(longest)
        ranks.put(giver, longest._replace(high=middle))
        ranks.put(taker, moved)


def _cut(document: int, size: int, ranks: Ranks) -> None:
    """Cut a document into the fewest pieces that fit, roomiest rank first."""
    low = 0
    for rank in sorted(range(len(ranks.room)), key=lambda rank: (-ranks.room[rank], rank)):
        high = min(size, low + ranks.room[rank])
        ranks.put(rank, Piece(document, low, high))
        low = high


def even_out(ranks: Ranks) -> None:
    """Trade rows between the busiest and an idle rank, as many for as many, until work is even.

    Last rows are traded for first ones, which few and many later rows see: work is then even where the query
    rows are, and no longer where the keys are.
    """
    everyone = range(len(ranks.work))
    for _ in range(4 * len(ranks.work)):
        mean = sum(ranks.work) / len(ranks.work)
        busy = max(everyone, key=ranks.work.__getitem__)
        if ranks.work[busy] <= WORK_TOLERANCE * mean:
            return
        idle = sorted((r for r in everyone if ranks.work[r] < mean), key=ranks.work.__getitem__)
        # of one cost, all pairs move alike: a trade that does not help means that less than a row is uneven
        others = idle[: MOST_IDLE if ranks.kernels.factor > 1 else 1]
        if not any(_trade(ranks, busy, other, mean) for other in others):
            return


def _trade(ranks: Ranks, busy: int, idle: int, mean: float) -> bool:
    """Make the best trade between two ranks; False, with nothing changed, if none helps."""
    trade = _best_trade(ranks, busy, idle, mean)
    if trade is None:
        return False
    gives, takes, rows = trade
    given, taken = list(ranks.pieces[busy]), list(ranks.pieces[idle])
    late, early = given.pop(gives), taken.pop(takes)
    last, first = late._replace(low=late.high - rows), early._replace(high=early.low + rows)
    rest = late._replace(high=late.high - rows), early._replace(low=early.low + rows)
    ranks.replace(busy, [*given, rest[0], first])
    ranks.replace(idle, [*taken, rest[1], last])
    return True


def _best_trade(ranks: Ranks, busy: int, idle: int, mean: float) -> tuple[int, int, int] | None:
    """The last rows of which piece for how many first rows of which other; None: no trade helps.

    Among the trades that move about the surplus, the one that wastes the least; else the one that leaves the
    busier of both with the least work.
    """
    if not ranks.pieces[busy] or not ranks.pieces[idle]:
        return None
    kernels, factor = ranks.kernels, ranks.kernels.factor
    before, low_before = ranks.work[busy], ranks.work[idle]
    surplus = min(before - mean, mean - low_before)
    gives, start, high = (x[:, None] for x in _longest(ranks.pieces[busy]))
    takes, low, stop = _longest(ranks.pieces[idle])
    reach = high - low
    rows = _row_counts(high - start, stop - low, reach, surplus, factor)
    # m rows move m * (reach - m) pairs; what blocks save is counted anew for what is left and what changes hands
    drop = rise = factor * rows * (reach - rows)
    if factor > 1:
        low_of, high_of = np.empty((2, 4, *rows.shape), dtype=np.int64)
        low_of[0], low_of[1], low_of[2], low_of[3] = start, low, low + rows, high - rows
        high_of[0], high_of[1], high_of[2], high_of[3] = high - rows, low + rows, stop, high
        left, first, rest, last = kernels.saved(low_of, high_of)
        drop = drop - kernels.saved(start, high) + left + first
        rise = rise + kernels.saved(low, stop) - rest - last
    after = np.maximum(before - drop, low_before + rise)
    # a cut on the edge of a tile leaves none half idle, yet is one more piece
    weight = np.where(rows % TILE_ROWS == 0, 0.05, 1.0)
    cut = (rows < high - start) * (high - rows) + (rows < stop - low) * (low + rows)
    waste = factor * TILE_ROWS // 2 * weight * cut + (rise - drop)
    enough = 2 * drop >= surplus
    if factor > 1:
        enough &= after < before
    score = np.where(enough, waste, np.inf) if enough.any() else after
    k, i, j = np.unravel_index(int(np.argmin(score)), score.shape)
    if after[k, i, j] >= before:
        return None
    return int(gives[i, 0]), int(takes[j]), int(rows[k, i, j])


def _row_counts(
    long: Numbers, wide: Numbers, reach: Numbers, surplus: float, factor: int
) -> Numbers:
    """How many rows two pieces might trade, [choices, pieces, pieces]; m rows move m * (reach - m) pairs."""
    shorter = np.where(reach > 0, np.minimum(long, wide), 0)
    wanted = np.array([surplus / each for each in range(1, factor + 1)])[:, None, None]
    root = np.sqrt(np.maximum(reach * reach - 4 * wanted, 0))
    exact = np.ceil((reach - root) / 2)
    tiles = np.maximum(np.round(exact / TILE_ROWS), 1) * TILE_ROWS
    fits = (2 * tiles <= reach) & (tiles * (reach - tiles) <= OVERSHOOT * wanted)
    found = [np.where(fits, tiles, exact)]
    if factor > 1:
        # a whole piece leaves no new one, whose block might be too small
        found.append(shorter[None])
    rows: Numbers = np.clip(np.concatenate(found), 0, shorter).astype(np.int64)
    return rows


def _longest(pieces: Sequence[Piece]) -> tuple[Numbers, Numbers, Numbers]:
    """Numbers, lows and highs of the longest pieces."""
    low, high = np.array(pieces, dtype=np.int64)[:, 1:].T
    chosen = np.argsort(low - high, kind="stable")[:MOST_PIECES]
    return chosen, low[chosen], high[chosen]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """In order, without empty ones, neighbours as one."""
    joined: list[Piece] = []
    for piece in sorted(piece for piece in pieces if piece.rows > 0):
        if joined and joined[-1].document == piece.document and joined[-1].high == piece.low:
            joined[-1] = joined[-1]._replace(high=piece.high)
        else:
            joined.append(piece)
    return joined

"""Which context-parallel rank computes which rows of each document: few pieces, even work, equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WORK_TOLERANCE = 1.01
"""Rows are traded until the busiest rank has at most this multiple of the mean work."""
TILE_ROWS = 128
"""Rows that a kernel computes at once. Trades move whole tiles where they can, as a cut inside one leaves
half of it idle on both ranks, on average."""
OVERSHOOT = 1.5
"""How much more work than asked for a trade may move to come to whole tiles; half as much is enough."""
MOST_PIECES = 48
"""Longest pieces of a rank that a trade looks at."""

Numbers = npt.NDArray[np.float64]


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

    @property
    def work(self) -> int:
        """Visible causal keys, the sum of position + 1."""
        return (self.high * (self.high + 1) - self.low * (self.low + 1)) // 2


class Ranks:
    """The pieces of every rank.

    Args:
        cp: ranks.
        capacity: rows that each can take.
    """

    def __init__(self, cp: int, capacity: int) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in range(cp)]
        self.room = [capacity] * cp
        self.work = [0] * cp

    def put(self, rank: int, piece: Piece) -> None:
        """Give a piece to a rank, also beyond its room."""
        if piece.rows > 0:
            self.pieces[rank].append(piece)
            self.room[rank] -= piece.rows
            self.work[rank] += piece.work

    def replace(self, rank: int, pieces: Sequence[Piece]) -> None:
        """Give a rank other pieces of as many rows."""
        self.pieces[rank] = _joined(pieces)
        self.work[rank] = sum(piece.work for piece in pieces)

    @property
    def cost(self) -> int:
        """Work of the busiest rank, and half a tile at both ends of each of its pieces."""
        return max(
            work + sum(TILE_ROWS // 2 * (piece.low + piece.high) for piece in pieces)
            for work, pieces in zip(self.work, self.pieces, strict=True)
        )


def place(
    sizes: Sequence[int], num_long: int, cp: int, capacity: int, *, trades: bool = True
) -> Ranks:
    """Zigzag the longest documents, keep the others whole, and even the work out by trades.

    A zigzagged document is cut into 2 * cp nearly equal chunks, rank r takes chunks r and 2 * cp - 1 - r.
    Each other one goes to the rank with the least work that still has room, or is cut where none has.

    Args:
        sizes: rows of each document.
        num_long: how many are zigzagged.
        cp: ranks.
        capacity: rows of a rank; together they are enough for all.
        trades: trade last rows for first ones, which few and many later rows see: work is then even where the
            query rows are, and no longer where the keys are.
    """
    ranks = Ranks(cp, capacity)
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
    if trades:
        _even_out(ranks)
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
        ranks.work[giver] -= longest.work
        ranks.put(giver, longest._replace(high=middle))
        ranks.put(taker, moved)


def _cut(document: int, size: int, ranks: Ranks) -> None:
    """Cut a document into the fewest pieces that fit, roomiest rank first."""
    low = 0
    for rank in sorted(range(len(ranks.room)), key=lambda rank: (-ranks.room[rank], rank)):
        high = min(size, low + ranks.room[rank])
        ranks.put(rank, Piece(document, low, high))
        low = high


def _even_out(ranks: Ranks) -> None:
    """Trade rows between the busiest and the idlest rank, as many for as many, until work is even."""
    everyone, mean = range(len(ranks.work)), sum(ranks.work) / len(ranks.work)
    for _ in range(4 * len(ranks.work)):
        busy = max(everyone, key=ranks.work.__getitem__)
        idle = min(everyone, key=ranks.work.__getitem__)
        before = ranks.work[busy]
        if before <= WORK_TOLERANCE * mean:
            return
        old = ranks.pieces[busy], ranks.pieces[idle]
        trade = _best_trade(*old, min(before - mean, mean - ranks.work[idle]))
        if trade is None:
            return
        gives, takes, rows = trade
        late, early = old[0][gives], old[1][takes]
        last, first = late._replace(low=late.high - rows), early._replace(high=early.low + rows)
        rest = late._replace(high=late.high - rows), early._replace(low=early.low + rows)
        ranks.replace(busy, [*old[0][:gives], *old[0][gives + 1 :], rest[0], first])
        ranks.replace(idle, [*old[1][:takes], *old[1][takes + 1 :], rest[1], last])
        if max(ranks.work[busy], ranks.work[idle]) >= before:
            ranks.replace(busy, old[0])
            ranks.replace(idle, old[1])
            return


def _best_trade(
    busy: Sequence[Piece], idle: Sequence[Piece], surplus: float
) -> tuple[int, int, int] | None:
    """The last rows of which piece for how many first rows of which other.

    Among the trades that move about ``surplus``, the one that cuts the fewest rows of keys; else the one
    that moves the most.
    """
    if not busy or not idle:
        return None
    (gives, _, high, long), (takes, low, _, wide) = _longest(busy), _longest(idle)
    high, long, low, wide = high[:, None], long[:, None], low[None], wide[None]
    reach = high - low  # m rows move m * (reach - m) of work
    exact = np.ceil((reach - np.sqrt(np.maximum(reach * reach - 4 * surplus, 0))) / 2)
    tiles = np.maximum(np.round(exact / TILE_ROWS), 1) * TILE_ROWS
    fits = (2 * tiles <= reach) & (tiles * (reach - tiles) <= OVERSHOOT * surplus)
    rows = np.where(fits, tiles, exact)
    rows = np.where(reach > 0, np.minimum(rows, np.minimum(long, wide)), 0)
    moved = rows * (reach - rows)
    if moved.max() <= 0:
        return None
    # a cut on the edge of a tile leaves none half idle, yet is one more piece
    weight = np.where(rows % TILE_ROWS == 0, 0.05, 1.0)
    cut = np.where(rows < long, high - rows, 0) + np.where(rows < wide, low + rows, 0)
    enough = moved >= surplus / 2
    score = np.where(enough, weight * cut, np.inf) if enough.any() else -moved
    i, j = np.unravel_index(int(np.argmin(score)), score.shape)
    return int(gives[i]), int(takes[j]), int(rows[i, j])


def _longest(pieces: Sequence[Piece]) -> tuple[npt.NDArray[np.int64], Numbers, Numbers, Numbers]:
    """Numbers, lows, highs and rows of the longest pieces."""
    low, high = (np.array([piece[i] for piece in pieces], dtype=np.float64) for i in (1, 2))
    chosen = np.argsort(low - high, kind="stable")[:MOST_PIECES]
    return chosen, low[chosen], high[chosen], (high - low)[chosen]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """In order, without empty ones, neighbours as one."""
    joined: list[Piece] = []
    for piece in sorted(piece for piece in pieces if piece.rows > 0):
        if joined and joined[-1].document == piece.document and joined[-1].high == piece.low:
            joined[-1] = joined[-1]._replace(high=piece.high)
        else:
            joined.append(piece)
    return joined

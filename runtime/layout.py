"""Where packed rows live: documents to micro-batches, and the rows of one micro-batch to cp ranks.

A function of document lengths and sizes alone, so log-probs, training and every rank agree on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_compile.errors import BatchError, ConfigError

Rows = npt.NDArray[np.int64]

MIN_ROWS = 2
"""Fewest rows of a rank: graphs are captured for sizes of at least 2."""
WORK_TOLERANCE = 1.05
"""Documents stay whole as long as the busiest rank has at most this multiple of the mean work."""
TOKEN_WORK = 4096
"""Keys whose attention costs as much as the rest of one token: about 6 times the hidden size."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Which rows of a packed micro-batch each cp rank owns."""

    slots: Rows
    """int64 [cp * n]: a permutation; rank r owns ``slots[r * n : (r + 1) * n]``, ascending.
    Values of ``num_tokens`` and above are dead rows."""
    num_tokens: int
    rows_per_rank: int
    cp: int
    work: Rows
    """int64 [cp]: attention work of each rank, the sum of position + 1 over its rows. Branch keys come on top,
    as many a row, and so as many a rank; `balance.measure_balance` counts them."""

    def rows(self, rank: int) -> Rows:
        """Return the rows that ``rank`` owns, ascending, dead rows last; int64 [n]."""
        return self.slots[rank * self.rows_per_rank : (rank + 1) * self.rows_per_rank]

    @property
    def padding_share(self) -> float:
        """Dead rows over all rows: fewer than cp of them when there are 2 * cp tokens or more."""
        return 1.0 - self.num_tokens / len(self.slots)

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean of all ranks; 1.0 is perfect."""
        total = int(self.work.sum())
        return float(self.work.max()) * self.cp / total if total else 1.0


def plan_layout(lengths: Sequence[int], cp: int) -> RowLayout:
    """Place the rows of a packed micro-batch on ``cp`` ranks.

    Every rank gets exactly ``max(2, ceil(T / cp))`` rows, the fewest possible. The longest
    documents are zigzagged: cut into 2 * cp nearly equal chunks, rank r takes chunks r and
    2 * cp - 1 - r. The others stay whole, each on the rank with the least attention work that still
    has room. The threshold between the two is not a constant: it is the highest at which the work
    is within `WORK_TOLERANCE` of even, else the one with the least imbalance. A document that fits
    nowhere is cut, and a zigzag that overflows a rank's rows gives its last ones away.

    Args:
        lengths: Tokens of each document, in packed order; zeros allowed, T is their sum.
        cp: Number of ranks.

    Raises:
        BatchError: A length is negative.
        ConfigError: ``cp`` is not positive.
    """
    if cp < 1:
        raise ConfigError(f"a layout needs cp of at least 1, found {cp}")
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if len(sizes) and int(sizes.min()) < 0:
        raise BatchError(f"document lengths must be 0 or more, found {int(sizes.min())}")
    total = int(sizes.sum())
    capacity = max(MIN_ROWS, -(-total // cp))
    starts = np.cumsum(sizes) - sizes
    row_work = np.arange(total, dtype=np.int64) - np.repeat(starts, sizes) + 1
    order = [int(i) for i in np.argsort(-sizes, kind="stable") if sizes[i]]

    best: tuple[int, Rows, Rows] | None = None
    for num_long in _thresholds(sizes, cp):
        owner = _place(sizes, starts, order, num_long, cp, capacity)
        work = np.zeros(cp, dtype=np.int64)
        np.add.at(work, owner, row_work)
        peak = int(work.max())
        if best is None or peak < best[0]:
            best = (peak, owner, work)
        if peak * cp <= WORK_TOLERANCE * int(work.sum()):
            break
    assert best is not None
    _, owner, work = best
    return RowLayout(_slots(owner, cp, capacity), total, capacity, cp, work)


def _thresholds(sizes: Rows, cp: int) -> list[int]:
    """Numbers of documents to zigzag, longest first; shorter ones than 2 * cp rows never are."""
    most = int((sizes >= 2 * cp).sum()) if cp > 1 else 0
    counts = [0]
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 4)))
    return counts


def _place(
    sizes: Rows, starts: Rows, order: list[int], num_long: int, cp: int, capacity: int
) -> Rows:
    """Return the owner of each row, int64 [T], with at most ``capacity`` rows a rank."""
    owner = np.zeros(int(sizes.sum()), dtype=np.int64)
    room = [capacity] * cp
    work = [0] * cp
    for document in order[:num_long]:
        begin, length = int(starts[document]), int(sizes[document])
        cuts = [i * length // (2 * cp) for i in range(2 * cp + 1)]
        for chunk in range(2 * cp):
            rank = min(chunk, 2 * cp - 1 - chunk)
            low, high = cuts[chunk], cuts[chunk + 1]
            owner[begin + low : begin + high] = rank
            room[rank] -= high - low
            work[rank] += _work(low, high)
    _give_away(owner, room, starts[order[:num_long]], sizes[order[:num_long]])
    for document in order[num_long:]:
        begin, length = int(starts[document]), int(sizes[document])
        roomy = [rank for rank in range(cp) if room[rank] >= length]
        if roomy:
            pieces = [(min(roomy, key=lambda rank: (work[rank], rank)), 0, length)]
        else:
            pieces = _cut(length, room)
        for rank, low, high in pieces:
            owner[begin + low : begin + high] = rank
            room[rank] -= high - low
            work[rank] += _work(low, high)
    return owner


def _work(low: int, high: int) -> int:
    """Sum of position + 1 over positions low..high-1 of one document."""
    return (high * (high + 1) - low * (low + 1)) // 2


def _cut(length: int, room: list[int]) -> list[tuple[int, int, int]]:
    """Cut a document into the fewest pieces (rank, low, high) that fit, roomiest rank first."""
    pieces = []
    low = 0
    for rank in sorted(range(len(room)), key=lambda rank: (-room[rank], rank)):
        high = min(length, low + room[rank])
        if high > low:
            pieces.append((rank, low, high))
        low = high
    return pieces


def _give_away(owner: Rows, room: list[int], starts: Rows, sizes: Rows) -> None:
    """Move single rows from ranks with too many to ranks with room, one per document in turn."""
    cp = len(room)
    while min(room) < 0:
        for begin, length in zip(starts.tolist(), sizes.tolist(), strict=True):
            giver = min(range(cp), key=lambda rank: room[rank])
            taker = max(range(cp), key=lambda rank: room[rank])
            if room[giver] >= 0:
                return
            mine = np.flatnonzero(owner[begin : begin + length] == giver)
            if len(mine):
                owner[begin + int(mine[-1])] = taker
                room[giver] += 1
                room[taker] -= 1


def _slots(owner: Rows, cp: int, capacity: int) -> Rows:
    dead = len(owner)
    parts = []
    for rank in range(cp):
        live = np.flatnonzero(owner == rank)
        padding = np.arange(dead, dead + capacity - len(live), dtype=np.int64)
        dead += len(padding)
        parts += [live.astype(np.int64), padding]
    return np.concatenate(parts)


def deal_documents(
    lengths: Sequence[int],
    num_micro_batches: int,
    *,
    max_tokens: int | None = None,
    token_work: int = TOKEN_WORK,
) -> list[list[int]]:
    """Deal whole documents to micro-batches of nearly equal work.

    Longest first, each to the micro-batch with the least work so far. Work of a document is
    ``token_work`` a token plus its attention work.

    Args:
        lengths: Tokens of each document.
        num_micro_batches: Their number; some stay empty when there are fewer documents.
        max_tokens: Tokens that a micro-batch should not exceed; broken only by a document that
            fits nowhere, which then joins the micro-batch with the fewest tokens.
        token_work: Keys whose attention costs as much as the rest of one token.

    Returns:
        The document numbers of each micro-batch, ascending.
    """
    if num_micro_batches < 1:
        raise ConfigError(f"expected 1 micro-batch or more, found {num_micro_batches}")
    dealt: list[list[int]] = [[] for _ in range(num_micro_batches)]
    tokens = [0] * num_micro_batches
    heap = [(0, index) for index in range(num_micro_batches)]
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        length = int(lengths[document])
        full = []
        while heap and max_tokens is not None and tokens[heap[0][1]] + length > max_tokens:
            full.append(heapq.heappop(heap))
        if heap:
            work, index = heapq.heappop(heap)
        else:
            work, index = min(full, key=lambda entry: (tokens[entry[1]], entry[1]))
            full.remove((work, index))
        dealt[index].append(document)
        tokens[index] += length
        heapq.heappush(heap, (work + token_work * length + _work(0, length), index))
        for entry in full:
            heapq.heappush(heap, entry)
    return [sorted(documents) for documents in dealt]


def num_micro_batches_for(
    lengths: Sequence[int], max_tokens: int, *, token_work: int = TOKEN_WORK
) -> int:
    """Count the fewest micro-batches of at most ``max_tokens`` tokens that hold all documents.

    A document longer than ``max_tokens`` cannot be cut: it gets a micro-batch that holds nothing
    else but empty documents.
    """
    if max_tokens < 1:
        raise ConfigError(f"expected max_tokens of at least 1, found {max_tokens}")
    sizes = [int(length) for length in lengths]
    room = max(max_tokens, *sizes) if sizes else max_tokens
    count = max(1, -(-sum(sizes) // room))
    while not _fits(sizes, count, max_tokens, token_work):
        count += 1
    return count


def _fits(sizes: list[int], count: int, max_tokens: int, token_work: int) -> bool:
    for documents in deal_documents(sizes, count, max_tokens=max_tokens, token_work=token_work):
        filled = [sizes[document] for document in documents if sizes[document]]
        if sum(filled) > max_tokens and len(filled) > 1:
            return False
    return True

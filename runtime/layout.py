"""Where packed rows live: documents to micro-batches, and the rows of one micro-batch to cp ranks.

A function of document lengths, sizes and the kernels that all ranks use, so log-probs, training and every rank
agree on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_compile.errors import BatchError, ConfigError

from .kernel_cost import PAIRS, KernelCost
from .placement import Ranks, even_out, place

Rows = npt.NDArray[np.int64]

MIN_ROWS = 2
"""Fewest rows of a rank: graphs are captured for sizes of at least 2."""
WORK_TOLERANCE = 1.05
"""Documents that are not traded stay whole while the busiest rank has at most this multiple of the mean work."""
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
    """int64 [cp]: attention work of each rank, the sum of position + 1 over its rows, or what its pieces cost the
    kernels that the layout was planned for. Branch keys come on top, as many a row, and so as many a rank;
    `balance.measure_balance` counts them."""
    factors: npt.NDArray[np.float64] | None = None
    """[cp * n]: what a causal pair of the row at each slot costs, on average over its piece; None: 1, everywhere."""

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


def plan_layout(
    lengths: Sequence[int], cp: int, *, by_keys: bool = False, kernels: KernelCost = PAIRS
) -> RowLayout:
    """Place the rows of a packed micro-batch on ``cp`` ranks.

    Every rank gets exactly ``max(2, ceil(T / cp))`` rows, the fewest possible, and nearly the same attention
    work, in few pieces: kernels compute tiles of rows, and a piece seldom ends with one. So documents stay
    whole where they can, rows are traded to even the work out (`placement.place`), and only those that make
    up the work of several ranks may be zigzagged over all. How many are is what costs the busiest rank least.
    Work is counted in pairs of a row and a key that it sees, or in the time that ``kernels`` take for them, as if
    all keys were at hand ("all_gather"; a "ring" cuts blocks once more where pieces of a document change owners).

    Where work is done by the owners of keys ("pass_q"), trades would make it uneven. Then documents are zigzagged,
    longest first, until pairs are within `WORK_TOLERANCE` of even, which they are for query rows and keys alike.

    Args:
        lengths: Tokens of each document, in packed order; zeros allowed, T is their sum.
        cp: Number of ranks.
        by_keys: Whether work is done where the keys are.
        kernels: What pieces of documents cost; the same on every rank. Unused with ``by_keys``.

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
    if by_keys:
        best = _zigzagged(sizes, cp, capacity)
    else:
        best = _traded(sizes, cp, capacity, kernels)
    work = np.asarray(best.work, dtype=np.int64)
    slots = _slots(best, np.cumsum(sizes) - sizes, total, capacity)
    factors = None if best.kernels.factor == 1 else _factors(best, capacity)
    return RowLayout(slots, total, capacity, cp, work, factors)


def _traded(sizes: Rows, cp: int, capacity: int, kernels: KernelCost) -> Ranks:
    """The pieces with which the busiest rank costs least, after trades.

    Trades that even out the kernels' time look at more ways to cut, and may end in more pieces than those
    that even out pairs, which are tried too.
    """
    best = _of_one_cost(sizes, cp, capacity, kernels)
    if kernels == PAIRS:
        return best
    even = _of_one_cost(sizes, cp, capacity, PAIRS).counted(kernels)
    return min(best, even, key=lambda ranks: max(ranks.costs))


def _of_one_cost(sizes: Rows, cp: int, capacity: int, kernels: KernelCost) -> Ranks:
    """The number of zigzagged documents with which the busiest rank costs least, after trades."""
    best: Ranks | None = None
    for number in _numbers_of_long(sizes, cp, capacity, kernels):
        ranks = place(sizes.tolist(), number, cp, capacity, kernels=kernels)
        # trades even costs out, and seldom lower their sum
        if best is None or sum(ranks.costs) < cp * max(best.costs):
            even_out(ranks)
            best = ranks if best is None else min(best, ranks, key=lambda r: max(r.costs))
    assert best is not None, "0 is always tried"
    return best


def _numbers_of_long(sizes: Rows, cp: int, capacity: int, kernels: KernelCost) -> list[int]:
    """Numbers of documents to try to zigzag, longest first."""
    work = kernels.factor * (sizes * (sizes + 1) // 2) - kernels.saved(0 * sizes, sizes)
    mean = int(work.sum()) / cp
    bounds = (sizes > capacity, *(work > ranks * mean for ranks in (1, 2, 4)))
    return sorted({0, *(int(long.sum()) for long in bounds)})


def _zigzagged(sizes: Rows, cp: int, capacity: int) -> Ranks:
    """The fewest zigzagged documents with which work is even, else the number with which it is most even."""
    most = int((sizes >= 2 * cp).sum()) if cp > 1 else 0
    best: Ranks | None = None
    number = 0
    while True:
        ranks = place(sizes.tolist(), number, cp, capacity)
        if best is None or max(ranks.work) < max(best.work):
            best = ranks
        if number == most or max(ranks.work) * cp <= WORK_TOLERANCE * sum(ranks.work):
            return best
        number = min(most, number + max(1, number // 4))


def _slots(ranks: Ranks, starts: Rows, total: int, capacity: int) -> Rows:
    dead, parts = total, []
    for pieces in ranks.pieces:
        live = [
            np.arange(starts[document] + low, starts[document] + high)
            for document, low, high in pieces
        ]
        padding = capacity - sum(map(len, live))
        parts += [*live, np.arange(dead, dead + padding)]
        dead += padding
    return np.concatenate(parts).astype(np.int64)


def _factors(ranks: Ranks, capacity: int) -> npt.NDArray[np.float64]:
    factors = np.ones((len(ranks.pieces), capacity))
    for row, pieces in zip(factors, ranks.pieces, strict=True):
        at = 0
        for piece in pieces:
            row[at : at + piece.rows] = ranks.work_of(piece) / PAIRS.of(piece.low, piece.high)
            at += piece.rows
    return factors.reshape(-1)


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
        heapq.heappush(heap, (work + token_work * length + length * (length + 1) // 2, index))
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

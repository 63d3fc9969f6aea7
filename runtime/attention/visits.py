"""Which rows of one rank see keys of another: known on both sides, from index vectors alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_compile.ir.traffic import RowBytes

from .blocks import BlockPlan, cached_plan
from .host import remembered
from .interface import Cut
from .runs import Array, find_intervals

MOST_UNEVEN = 1.1
"""Work of the busiest rank where the keys are, over that where the query rows are, up to which rows may visit."""


@dataclass(frozen=True)
class Visit:
    """The rows of one rank that see keys of another, and how."""

    rows: Tensor | None
    """int64, ascending, among the visiting rank's; None: all of them."""
    plan: BlockPlan
    """Of these rows against the visited rank's keys."""

    def pick(self, x: Tensor) -> Tensor:
        """The rows that travel."""
        return x if self.rows is None else x.index_select(0, self.rows)


Visits = Callable[[int, int], Visit]
"""Given the visiting and the visited rank."""


def visits_of(
    q_document: Tensor, q_limit: Tensor, k_document: Tensor, slots: Tensor, *, window: int,
    live_rows: int, size: int, cut: Cut,
) -> Visits:  # fmt: skip
    """Give the visits between ``size`` ranks; a rank's visit to itself takes all its rows.

    Args:
        q_document: int64 [size * R], by rank.
        q_limit: int64 [size * R], in packed rows.
        k_document: int64 [size * n], by packed row.
        slots: int64 [size * n], the packed row at each slot, by rank.
        window: visible main keys below the limit; -1 for all.
        live_rows: packed rows from here on are no keys.
        size: ranks.
        cut: what the backend wants.
    """
    vectors = (q_document, q_limit, k_document, slots)

    @functools.cache
    def visit(guest: int, host: int) -> Visit:
        def make(documents: Array, limits: Array, k_documents: Array, order: Array) -> Visit:
            document, limit = (np.split(x, size)[guest] for x in (documents, limits))
            keys = np.split(order, size)[host]
            low, high = _range(limit, window, live_rows)
            rows = None
            if guest != host:
                _, first, past = find_intervals(document, low, high, k_documents[keys], keys)
                seeing = np.flatnonzero(past > first)
                document, low, high = document[seeing], low[seeing], high[seeing]
                if len(seeing) < len(limit):
                    rows = torch.from_numpy(seeing).to(slots.device)
            return Visit(rows, cached_plan(document, low, high, k_documents[keys], keys, cut))

        return remembered(vectors, ("visit", window, live_rows, guest, host, size, cut), make)

    return visit


def fewest_bytes(
    q_document: Tensor, q_limit: Tensor, k_document: Tensor, slots: Tensor, *, window: int,
    live_rows: int, size: int, row: RowBytes,
) -> str:  # fmt: skip
    """Name "ring" or "pass_q", whichever's busiest rank sends less, forward and backward together.

    "pass_q" computes where the keys are, and is named only where that is about as even as where the query rows
    are. Every rank finds the same, also where there is no backward. Arguments are those of `visits_of`; ``row``
    has the bytes of single rows.
    """

    def make(documents: Array, limits: Array, k_documents: Array, order: Array) -> str:
        low, high = _range(limits, window, live_rows)
        owner = np.arange(len(order)) // (len(order) // size)
        kept, first, past = find_intervals(documents, low, high, k_documents[order], order)
        owner = owner if kept is None else owner[kept]
        travel, work = (np.zeros((size, size), dtype=np.int64) for _ in range(2))
        for host in range(size):
            before = np.append(0, np.cumsum(owner == host))
            seen = np.maximum(before[past] - before[first], 0).reshape(size, -1)
            travel[:, host], work[:, host] = (seen > 0).sum(1), seen.sum(1)
        if work.sum(0).max() > MOST_UNEVEN * work.sum(1).max():
            return "ring"
        np.fill_diagonal(travel, 0)
        there, back = row.query + row.visitor, row.partial + row.query_gradient
        visits = int((travel.sum(1) * there + travel.sum(0) * back).max())
        hops = (size - 1) * (2 * row.key + row.key_gradient)
        return "pass_q" if visits < len(order) // size * hops else "ring"

    vectors = (q_document, q_limit, k_document, slots)
    return remembered(vectors, ("fewest bytes", window, live_rows, size, row), make)


def _range(limit: Array, window: int, live_rows: int) -> tuple[Array, Array]:
    low = np.zeros_like(limit) if window < 0 else limit - window
    return low, np.minimum(limit, live_rows)

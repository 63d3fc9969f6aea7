"""Which rows of a packed batch lie where in Megatron's [sequence, batch, hidden] activations.

Legend: S x B the padded form, c context-parallel index, k tensor-parallel index, n rows of a rank.
The draft has one row-parallel group made of both: its rank is ``c * tp + k``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.checked_batch import CheckedBatch
from spec_compile.errors import BatchError
from spec_compile.runtime.layout import MIN_ROWS, RowLayout, Rows


@dataclass(frozen=True)
class Sharding:
    """How Megatron spreads the rows of a micro-batch over the ranks of one stage."""

    cp: int
    tp: int
    sequence_parallel: bool
    """Activations between layers are cut along the sequence over tp; else every tp rank has all of them."""

    @property
    def size(self) -> int:
        """Ranks that share the draft's rows."""
        return self.cp * self.tp


@dataclass(frozen=True, eq=False)
class Placed:
    """One micro-batch as the draft's ranks see it."""

    layout: RowLayout
    takes: tuple[Tensor, ...]
    """By rank: int64 [n], which of its local activations, flattened to [s * b], each of its rows is."""
    local: tuple[int, int]
    """(s, b) of the activations between layers."""


def place(batch: PackedBatch, checked: CheckedBatch, sharding: Sharding) -> Placed:
    """Find the rows of every rank; padding becomes dead rows.

    Args:
        batch: as the user gave it; without `PackedBatch.padding` it is one row of T tokens (B = 1).
        checked: the same, checked.
        sharding: of the stage.

    Raises:
        BatchError: the padded form does not divide over the ranks.
    """
    total = checked.num_tokens
    width = (1, total) if batch.padding is None else batch.padding.shape
    num_rows, length = width
    flat = np.arange(total) if batch.padding is None else batch.padding.rows.cpu().numpy()
    parts = [_positions(length, c, sharding) for c in range(sharding.cp)]
    local = len(parts[0]) // (sharding.tp if sharding.sequence_parallel else 1)
    row_of = np.full(num_rows * length, -1, dtype=np.int64)
    row_of[flat] = np.arange(total)
    owned, takes = [], []
    for part in parts:
        share = -(-len(part) // sharding.tp)
        for k in range(sharding.tp):
            mine = part[k * share : (k + 1) * share]
            first = 0 if sharding.sequence_parallel else k * share
            # activations are sequence first
            owned.append(row_of[(mine[:, None] + length * np.arange(num_rows)).reshape(-1)])
            takes.append(np.arange(first * num_rows, (first + len(mine)) * num_rows))
    return _filled(owned, takes, (local, num_rows), total)


def _positions(length: int, c: int, sharding: Sharding) -> Rows:
    """Positions of a context-parallel rank, in its order: chunks c and 2 cp - 1 - c of each sequence."""
    chunks = 1 if sharding.cp == 1 else 2 * sharding.cp
    pieces = chunks * (sharding.tp if sharding.sequence_parallel else 1)
    if length % pieces:
        raise BatchError(
            f"sequences of {length} positions do not divide over cp={sharding.cp}, tp={sharding.tp} "
            f"(sequence_parallel={sharding.sequence_parallel}); pad them to a multiple of {pieces}"
        )
    positions = np.arange(length, dtype=np.int64)
    if sharding.cp == 1:
        return positions
    size = length // chunks
    low, high = c * size, (chunks - 1 - c) * size
    return np.concatenate([positions[low : low + size], positions[high : high + size]])


def _filled(owned: list[Rows], takes: list[Rows], local: tuple[int, int], total: int) -> Placed:
    """Give every rank as many rows: live ones ascending, then dead ones, which repeat some activation."""
    each = max([MIN_ROWS, *map(len, owned)])
    dead = total
    slots, orders = [], []
    for rows, take in zip(owned, takes, strict=True):
        live = rows >= 0
        order = np.argsort(rows[live], kind="stable")
        missing = each - int(live.sum())
        slots += [rows[live][order], np.arange(dead, dead + missing, dtype=np.int64)]
        dead += missing
        filler = np.resize(take[~live] if (~live).any() else take[:1], missing)
        orders.append(np.concatenate([take[live][order], filler]).astype(np.int64))
    work = np.zeros(len(owned), dtype=np.int64)  # Megatron has placed the rows: nothing to balance
    layout = RowLayout(np.concatenate(slots), total, each, len(owned), work)
    return Placed(layout, tuple(torch.from_numpy(order) for order in orders), local)

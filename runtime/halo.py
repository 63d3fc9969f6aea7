"""Which rows a shift moves between ranks, worked out on the host from the layout alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention.host import remembered
from .fabric import Fabric

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Halo:
    """For each rank: own rows that it reads, and own rows to write with what it sends."""

    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


def halo_of(k: int, document: Tensor, slots: Tensor, live_rows: int, group: Fabric) -> Halo:
    """The exchange of ``y[row t] = x[row t + k]`` inside documents, remembered by tensors and by contents.

    Dead rows neither read nor are read.

    Args:
        k: rows to look ahead; negative looks back.
        document: int64 [cp * n], by packed row.
        slots: int64 [cp * n], the packed row at each slot.
        live_rows: T; packed rows from here on are dead.
        group: the cp group.
    """
    rank, size, device = group.rank, group.size, str(slots.device)

    def make(documents: Array, order: Array) -> Halo:
        return _lists(k, documents.tobytes(), order.tobytes(), live_rows, rank, size, device)

    return remembered((document, slots), ("halo", k, live_rows, rank, size), make)


@functools.lru_cache(maxsize=256)
def _lists(
    k: int, document: bytes, slots: bytes, live_rows: int, rank: int, size: int, device: str
) -> Halo:
    documents: Array = np.frombuffer(document, dtype=np.int64)
    order: Array = np.frombuffer(slots, dtype=np.int64)
    source = order + k
    inside = (source >= 0) & (source < live_rows) & (order < live_rows)
    source = np.where(inside, source, 0)
    inside &= documents[source] == documents[order]
    return exchange_of(source, inside, order, rank, size, device)


def exchange_of(
    source: Array, inside: npt.NDArray[np.bool_], order: Array, rank: int, size: int, device: str
) -> Halo:
    """The exchange in which slot ``i`` is written from row ``source[i]`` where ``inside[i]``.

    Args:
        source: int64 [size * n], packed rows.
        inside: bool [size * n].
        order: int64 [size * n], the packed row at each slot.
        rank: of this process in the cp group of ``size`` ranks.
        size: of the cp group.
        device: for the lists.
    """
    total, n = len(order), len(order) // size
    place = np.empty(total, dtype=np.int64)
    place[order] = np.arange(total)
    to, come = np.flatnonzero(inside), place[source[inside]]
    to_rank, come_rank = to // n, come // n

    def rows_of(slot: Array, mask: npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(slot[mask] % n).to(device)

    return Halo(
        tuple(rows_of(come, (come_rank == rank) & (to_rank == r)) for r in range(size)),
        tuple(rows_of(to, (to_rank == rank) & (come_rank == r)) for r in range(size)),
    )


def move_(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], x: Tensor, out: Tensor, group: Fabric
) -> None:
    """Send rows ``reads[r]`` of ``x`` to each rank r; put what rank r sent into rows ``writes[r]``."""
    own = group.rank
    out.index_copy_(0, writes[own], x.index_select(0, reads[own]))
    if group.size == 1:
        return
    send = [
        x.index_select(0, reads[r]) if r != own else x.new_empty((0, *x.shape[1:]))
        for r in range(group.size)
    ]
    shapes = [(len(writes[r]) if r != own else 0, *x.shape[1:]) for r in range(group.size)]
    for r, rows in enumerate(group.exchange(send, shapes, x.dtype)):
        if r != own:
            out.index_copy_(0, writes[r], rows)

"""Keys and values of running sequences, and which rows of a packed call belong to which of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

BLOCK = 64
"""Positions by which the cache grows at least."""


@dataclass(frozen=True)
class Group:
    """Rows that attend in one call: ``count`` new rows for each of neighbouring slots."""

    first_row: int
    first_slot: int
    num_slots: int
    count: int
    length: int
    """Positions of the cache that some row sees."""


@dataclass
class PackedRows:
    """The new rows of one call, sequence after sequence."""

    slots: Sequence[int]
    starts: Sequence[int]
    """Position of each sequence's first new row: as many rows of it are cached."""
    counts: Sequence[int]
    device: torch.device
    causal: bool = True
    """Each row sees its sequence up to itself; False: up to the last new row."""
    slot: Tensor = field(init=False)
    """int64 [T]."""
    position: Tensor = field(init=False)
    """int64 [T]."""
    groups: list[Group] = field(init=False)
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = torch.tensor(self.counts)
        offsets = torch.tensor(self.starts) - (counts.cumsum(0) - counts)
        position = torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts)
        self.position = position.to(self.device)
        self.slot = torch.tensor(self.slots).repeat_interleave(counts).to(self.device)
        self.groups = list(self._grouped())

    @property
    def room(self) -> tuple[int, int]:
        """Slots and positions that the cache must have."""
        return max(self.slots) + 1, max(group.length for group in self.groups)

    @property
    def last_rows(self) -> Tensor:
        """int64 [number of sequences]: each one's last new row."""
        return torch.tensor([end - 1 for end in accumulate(self.counts)], device=self.device)

    def _grouped(self) -> Iterator[Group]:
        first, slots = self.slots[0], list(self.slots)
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        if len(set(self.counts)) == 1 and slots == list(range(first, first + len(slots))):
            yield Group(0, first, len(slots), self.counts[0], max(ends))
            return
        row = 0
        for slot, count, end in zip(slots, self.counts, ends, strict=True):
            yield Group(row, slot, 1, count, end)
            row += count

    def mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask of a group, [num_slots, count, length]: 0 where a row sees a position."""
        key = (number, window, dtype)
        if key not in self.masks:
            group = self.groups[number]
            rows = slice(group.first_row, group.first_row + group.num_slots * group.count)
            position = self.position[rows].view(group.num_slots, group.count, 1)
            cached = torch.arange(group.length, device=self.device)
            last = position if self.causal else position[:, -1:].expand_as(position)
            visible = cached <= last
            if window is not None and self.causal:
                visible &= cached > position - window
            elif window is not None:  # a block sees so many rows in front of it, and all of itself
                visible &= cached >= position[:, :1] - window
            blank = torch.zeros(visible.shape, dtype=dtype, device=self.device)
            self.masks[key] = blank.masked_fill(~visible, float("-inf"))
        return self.masks[key]


class KVCache:
    """One left-aligned row of keys and values a slot: [slots, Hkv, capacity, D] a layer.

    Rows past a sequence's length are never visible, so rolling back is forgetting a length.
    """

    def __init__(self) -> None:
        self._num_slots, self._capacity = 0, BLOCK
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget and free everything."""
        self._layers.clear()
        self._num_slots, self._capacity = 0, BLOCK

    def reserve(self, slots: int, length: int) -> None:
        """Make room for this many sequences of this many positions."""
        if slots <= self._num_slots and length <= self._capacity:
            return
        self._num_slots = max(slots, self._num_slots)
        if length > self._capacity:
            self._capacity = max(-(-length // BLOCK) * BLOCK, self._capacity * 3 // 2)
        for layer, pair in self._layers.items():
            self._layers[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def _grown(self, old: Tensor) -> Tensor:
        new = self._blank(old, old.shape[1])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _blank(self, like: Tensor, heads: int) -> Tensor:
        """Zeros, because a masked value still meets a factor 0: it must not be NaN."""
        return like.new_zeros(self._num_slots, heads, self._capacity, like.shape[-1])

    def write(self, layer: int, rows: PackedRows, k: Tensor, v: Tensor) -> None:
        """Store keys and values [T, Hkv, D] of new rows."""
        if layer not in self._layers:
            self._layers[layer] = (self._blank(k, k.shape[1]), self._blank(v, v.shape[1]))
        keys, values = self._layers[layer]
        keys[rows.slot, :, rows.position] = k
        values[rows.slot, :, rows.position] = v

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values of a group, [num_slots, Hkv, length, D]: views."""
        slots = slice(group.first_slot, group.first_slot + group.num_slots)
        keys, values = self._layers[layer]
        return keys[slots, :, : group.length], values[slots, :, : group.length]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first positions of one slot to another."""
        for pair in self._layers.values():
            for cached in pair:
                cached[destination, :, :length] = cached[source, :, :length]

"""What a tap ring over CUDA IPC looks like: its words in shared host memory, its slots on the draft's device.

In order, the words are

    credit, drained | slot 0: posted, queued bytes, landed, header | slot 1: ...
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

from torch import Tensor

from .copy_engine import PAGE_BYTES, Engine
from .tap_slot import HEADER_BYTES, TapSpec, places_in_turn
from .tap_transport import RingLayout

CREDIT, CLOSED, DRAINED = 0, 1, 8
_SLOTS_AT = 16
_FIELDS = _POSTED, _QUEUED, _LANDED, _HEADER = 0, 1, 8, 16
_SLOT_WORDS = _HEADER + 8 * -(-HEADER_BYTES // 64)
_ALIGNMENT = 512
"""Of values, which follow each other without seals."""


class Slots:
    """The memory of a ring's slots; freed with the last tensor in it."""

    def __init__(self, engine: Engine, layout: RingLayout) -> None:
        self._engine = engine
        pages = max(1, -(-layout.depth * slot_bytes(layout) // PAGE_BYTES))
        self.address = engine.allocate(pages * PAGE_BYTES)
        weakref.finalize(self, engine.free, self.address)

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """A tensor in place, shaped like ``like``."""
        num_bytes = like.numel() * like.element_size()
        flat = self._engine.tensor(self.address + offset, num_bytes, self)
        return flat.view(like.dtype).view(like.shape)


class Place(NamedTuple):
    """Where one slot lies: its payload in bytes from the first one, and the indices of its words."""

    payload: int
    posted: int
    queued: int
    landed: int
    header: int


def places_of(layout: RingLayout) -> list[Place]:
    """The place of every slot."""
    firsts = [_SLOTS_AT + slot * _SLOT_WORDS for slot in range(layout.depth)]
    return [
        Place(slot * slot_bytes(layout), *(first + at for at in _FIELDS))
        for slot, first in enumerate(firsts)
    ]


@functools.lru_cache(maxsize=1024)
def starts(spec: TapSpec, rows: int) -> tuple[int, ...]:
    """Start of each value in a slot, and the end of all."""
    return places_in_turn(spec.sizes(rows), _ALIGNMENT)


def slot_bytes(layout: RingLayout) -> int:
    """Bytes of one slot."""
    return starts(layout.spec, layout.capacity_rows)[-1]


def words_bytes(layout: RingLayout) -> int:
    """Bytes of all words."""
    return 8 * (_SLOTS_AT + layout.depth * _SLOT_WORDS)

"""A ring of tap slots in host memory that two processes map, and the order in which they see it.

    credit | slot 0: stamp, header, payload | slot 1: ...

One writer, one reader. The writer fills payload and header, then writes the stamp; the reader sees
the expected stamp, then reads header and payload, and gives the slot back by raising the credit.
Behind each value of the payload lies its seal.

Memory ordering: stamp and credit are aligned 8-byte words; CPython stores and loads them by one
``memcpy`` of constant size 8, which compiles to one instruction on x86-64 and AArch64, so they are
never seen half-written. x86-64 keeps stores in order and loads in order, and the C library fences
its non-temporal copies. AArch64 does not, so both ends run `MappedRing._fence` between payload and
word: a lock's release followed by its acquire, which the architecture orders against everything
before and after. (Acquire followed by release would not do: both sides could move in between.)
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from .tap_seal import seal_at, seal_of
from .tap_slot import HEADER_BYTES, LINE
from .tap_transport import RingLayout, Wait

_PREAMBLE = 2 * LINE
_HEADER_AT = LINE
_PAYLOAD_AT = 4 * LINE


def ring_bytes(layout: RingLayout) -> int:
    """Bytes of a mapped ring."""
    return _PREAMBLE + layout.depth * (_PAYLOAD_AT + layout.payload_bytes)


class MappedRing:
    """One end's view of a ring: a `TapWriter` or a `TapReader`."""

    def __init__(self, layout: RingLayout, buffer: mmap.mmap, device: torch.device) -> None:
        self.layout = layout
        self.buffer = buffer
        self.device = device
        self._words = memoryview(buffer).cast("q")
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def credit(self) -> int:
        """The reader's word: how far it has given slots back."""
        return self._words[0]

    def wait_credit(self, expected: int, wait: Wait) -> None:
        """Poll the reader's word."""
        wait.until(lambda: self.credit, expected, "credit")

    def push(
        self, slot: int, stamp: int, header: bytes, values: Sequence[Tensor], wait: Wait
    ) -> None:
        """Fill a slot; the stamp last. Returns when the reader may read."""
        rows = len(values[0]) if values else 0
        for place, value in zip(self._places(slot, rows, values), values, strict=True):
            place.copy_(value.detach())
        for _, at, size in self._seals(slot, rows):
            self._words[at] = seal_of(stamp, size)
        at = self.start(slot) + _HEADER_AT
        self.buffer[at : at + HEADER_BYTES] = header
        self._fence()
        self._words[self.start(slot) // 8] = stamp

    def wait_stamp(self, slot: int, expected: int, wait: Wait) -> int:
        """Poll the slot's word."""
        seen = wait.until(lambda: self.stamp(slot), expected, "stamp")
        self._fence()
        return seen

    def stamp(self, slot: int) -> int:
        """The writer's word of a slot."""
        return self._words[self.start(slot) // 8]

    def header(self, slot: int) -> bytes:
        """The header's bytes."""
        at = self.start(slot) + _HEADER_AT
        return self.buffer[at : at + HEADER_BYTES]

    def values(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """The slot's values in place; copies where they belong on another device."""
        places = self._places(slot, rows, like)
        return [x if self.device.type == "cpu" else x.to(self.device) for x in places]

    def cut(self, slot: int, stamp: int, rows: int) -> list[int]:
        """Values without the seal of this push."""
        seals = self._seals(slot, rows)
        return [i for i, at, size in seals if self._words[at] != seal_of(stamp, size)]

    def begin(self, credit: int, num_pushes: int) -> None:
        """Nothing to prepare."""

    def give_credit(self, credit: int) -> None:
        """Raise the reader's word."""
        self._fence()
        self._words[0] = credit

    def poison(self, slot: int) -> None:
        """Overwrite the payload with NaNs."""
        start, size = self.start(slot) + _PAYLOAD_AT, self.layout.payload_bytes
        self.buffer[start : start + size] = b"\xff" * size

    def close(self) -> None:
        """Drop the mapping; it goes with the last tensor that was pulled."""

    def start(self, slot: int) -> int:
        """Where a slot begins, in bytes."""
        return _PREAMBLE + slot * (_PAYLOAD_AT + self.layout.payload_bytes)

    def _places(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        base = self.start(slot) + _PAYLOAD_AT
        return [
            torch.frombuffer(self.buffer, dtype=x.dtype, count=x.numel(), offset=base + at).view(
                x.shape
            )
            if x.numel()
            else torch.empty(x.shape, dtype=x.dtype)
            for x, at in zip(like, self.layout.spec.offsets(rows), strict=False)
        ]

    def _seals(self, slot: int, rows: int) -> list[tuple[int, int, int]]:
        """Of each value that is not empty: its number, the index of the word behind it, its size."""
        spec, base = self.layout.spec, self.start(slot) + _PAYLOAD_AT
        pairs = enumerate(zip(spec.offsets(rows), spec.sizes(rows), strict=False))
        return [(i, (base + at + seal_at(size)) // 8, size) for i, (at, size) in pairs if size]

    def _fence(self) -> None:
        self._gate.release()
        self._gate.acquire()

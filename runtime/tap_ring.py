"""A ring of tap slots in memory that two ends share, and what the bytes in it mean.

    credit | slot 0: stamp, header, payload | slot 1: ...

One writer, one reader. The writer fills payload and header, then writes the stamp; the reader sees
the expected stamp, then reads header and payload, and gives the slot back by raising the credit.

Memory ordering: stamp and credit are aligned 8-byte words; CPython stores and loads them by one
``memcpy`` of constant size 8, which compiles to one instruction on x86-64 and AArch64, so they are
never seen half-written. x86-64 keeps stores in order and loads in order, and the C library fences
its non-temporal copies. AArch64 does not, so both ends run `TapRing._fence` between payload and
word: a lock's release followed by its acquire, which the architecture orders against everything
before and after. (Acquire followed by release would not do: both sides could move in between.)
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

_LINE = 64
_PREAMBLE = 2 * _LINE
_HEADER_AT = _LINE
_PAYLOAD_AT = 4 * _LINE
_MAGIC = b"tapslot1"
_HEADER = struct.Struct("<8s16sqqqqII")
_CRC = struct.Struct("<I")


class Segments(Protocol):
    """Where shared bytes come from: `SharedMemory` or `Loopback`."""

    def create(self, num_bytes: int) -> tuple[str, mmap.mmap]:
        """Allocate zeroed memory; returns its name and the mapping."""

    def attach(self, name: str, num_bytes: int) -> mmap.mmap:
        """Map what another end created."""

    def unlink(self, name: str) -> None:
        """Remove the name; mappings stay valid."""


@dataclass(frozen=True)
class TapSpec:
    """What one source stage sends to the last stage for each micro-batch, whatever its rows."""

    source: int
    """Stage whose taps these are."""
    widths: tuple[int, ...]
    """Elements per row of each value."""
    dtypes: tuple[torch.dtype, ...]
    plan_hash: str
    """Hash of the lowered plan; slots of another plan are refused."""

    @property
    def code(self) -> int:
        """Checksum of widths and dtypes, as headers carry it."""
        return zlib.crc32(repr((self.widths, [str(d) for d in self.dtypes])).encode())

    def offsets(self, rows: int) -> list[int]:
        """Start of each value in the payload, in bytes, and the end of the last one."""
        ends = [0]
        for width, dtype in zip(self.widths, self.dtypes, strict=True):
            ends.append(ends[-1] + _aligned(rows * width * dtype.itemsize))
        return ends

    def check(self, values: Sequence[Tensor], rows: int, what: str) -> None:
        """Refuse values that differ from the description.

        Raises:
            ChannelError: Their number, rows, widths or dtypes are not the announced ones.
        """
        expected = [(rows, w, d) for w, d in zip(self.widths, self.dtypes, strict=True)]
        found = [(*_rows_and_width(value), value.dtype) for value in values]
        if expected != found:
            raise ChannelError(f"{what}: expected (rows, width, dtype) {expected}, found {found}")


class Header(NamedTuple):
    """What a slot says about its payload."""

    plan: bytes
    source: int
    step: int
    micro_batch: int
    rows: int
    code: int
    checksum: int
    """CRC-32 of the payload, 0 outside debugging."""


def make_header(spec: TapSpec, step: int, micro_batch: int, rows: int) -> Header:
    """Describe one micro-batch's taps, without checksum."""
    plan = hashlib.blake2b(spec.plan_hash.encode(), digest_size=16).digest()
    return Header(plan, spec.source, step, micro_batch, rows, spec.code, 0)


def ring_bytes(spec: TapSpec, depth: int, capacity_rows: int) -> int:
    """Bytes of a ring of ``depth`` slots for up to ``capacity_rows`` rows."""
    return _PREAMBLE + depth * _stride(spec, capacity_rows)


class TapRing:
    """One end's view of a ring."""

    def __init__(
        self, spec: TapSpec, depth: int, capacity_rows: int, buffer: mmap.mmap, debug: bool
    ) -> None:
        self.spec = spec
        self.depth = depth
        self.capacity_rows = capacity_rows
        self.buffer = buffer
        self.debug = debug
        self._words = memoryview(buffer).cast("q")
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def credit(self) -> int:
        """The reader's word: how far it has given slots back."""
        return self._words[0]

    @credit.setter
    def credit(self, value: int) -> None:
        self._fence()
        self._words[0] = value

    def stamp(self, slot: int) -> int:
        """The writer's word of a slot."""
        return self._words[self._start(slot) // 8]

    def write(self, slot: int, stamp: int, header: Header, values: Sequence[Tensor]) -> None:
        """Fill a slot; the stamp last. Returns when the reader may read."""
        for place, value in zip(self.views(slot, header.rows, values), values, strict=True):
            place.copy_(value.detach())
        if self.debug:
            header = header._replace(checksum=self._checksum(slot, header.rows))
        body = _HEADER.pack(_MAGIC, *header)
        at = self._start(slot) + _HEADER_AT
        self.buffer[at : at + _HEADER.size + _CRC.size] = body + _CRC.pack(zlib.crc32(body))
        self._fence()
        self._words[self._start(slot) // 8] = stamp

    def read(self, slot: int, expected: Header, like: Sequence[Tensor], where: str) -> list[Tensor]:
        """Return views of a slot whose stamp has been seen, shaped like ``like``.

        Raises:
            ChannelError: The header is torn, or is not ``expected``, or the checksum is wrong.
        """
        self._fence()
        at = self._start(slot) + _HEADER_AT
        body = self.buffer[at : at + _HEADER.size]
        (crc,) = _CRC.unpack_from(self.buffer, at + _HEADER.size)
        magic, *fields = _HEADER.unpack(body)
        if magic != _MAGIC or crc != zlib.crc32(body):
            raise ChannelError(f"{where}: the slot's header is torn: expected {expected}")
        seen = Header(*fields)
        wrong = [
            f"{name}: expected {want!r}, found {have!r}"
            for name, want, have in zip(Header._fields, expected, seen, strict=True)
            if want != have and name != "checksum"
        ]
        if wrong:
            raise ChannelError(f"{where}: the slot holds something else; {'; '.join(wrong)}")
        if seen.checksum and seen.checksum != self._checksum(slot, seen.rows):
            raise ChannelError(f"{where}: the payload is torn: its checksum differs")
        return self.views(slot, seen.rows, like)

    def views(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the slot's values in place, shaped like ``like``; separate storages."""
        base = self._start(slot) + _PAYLOAD_AT
        return [
            torch.frombuffer(self.buffer, dtype=x.dtype, count=x.numel(), offset=base + at).view(
                x.shape
            )
            if x.numel()
            else torch.empty(x.shape, dtype=x.dtype)
            for x, at in zip(like, self.spec.offsets(rows), strict=False)
        ]

    def poison(self, slot: int) -> None:
        """Overwrite a slot's payload with NaNs, so that a use after release shows."""
        start = self._start(slot) + _PAYLOAD_AT
        size = self.spec.offsets(self.capacity_rows)[-1]
        self.buffer[start : start + size] = b"\xff" * size

    def _checksum(self, slot: int, rows: int) -> int:
        start = self._start(slot) + _PAYLOAD_AT
        with memoryview(self.buffer) as data:
            crc = 0
            ends = self.spec.offsets(rows)
            sizes = zip(self.spec.widths, self.spec.dtypes, strict=True)
            for at, (width, dtype) in zip(ends, sizes, strict=False):
                low = start + at
                crc = zlib.crc32(data[low : low + rows * width * dtype.itemsize], crc)
        return crc or 1

    def _start(self, slot: int) -> int:
        return _PREAMBLE + slot * _stride(self.spec, self.capacity_rows)

    def _fence(self) -> None:
        self._gate.release()
        self._gate.acquire()


def _stride(spec: TapSpec, capacity_rows: int) -> int:
    return _PAYLOAD_AT + spec.offsets(capacity_rows)[-1]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _rows_and_width(value: Tensor) -> tuple[int, int]:
    if value.ndim == 0:
        return 0, 1
    return value.shape[0], math.prod(value.shape[1:])


def specs_digest(specs: Sequence[TapSpec]) -> str:
    """Hash of a tap list: all stages must have resolved the same one."""
    return hashlib.blake2b(repr(list(specs)).encode(), digest_size=8).hexdigest()

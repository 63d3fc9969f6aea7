"""What one slot of a tap ring holds: the values of one micro-batch, and a header that describes them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

from .tap_seal import sealed_bytes

LINE = 64
"""Values start at multiples of this many bytes."""
_MAGIC = b"tapslot1"
_HEADER = struct.Struct("<8s16sqqqqII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


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

    @functools.cached_property
    def code(self) -> int:
        """Checksum of widths and dtypes, as headers carry it."""
        return zlib.crc32(repr((self.widths, [str(d) for d in self.dtypes])).encode())

    @functools.cached_property
    def plan_code(self) -> bytes:
        """Short form of `plan_hash`, as headers carry it."""
        return hashlib.blake2b(self.plan_hash.encode(), digest_size=16).digest()

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Bytes of each value."""
        return _sizes(self.widths, self.dtypes, rows)

    def offsets(self, rows: int) -> tuple[int, ...]:
        """Start of each value, which its seal follows, in the payload, in bytes; and the end of all."""
        return _offsets(self.widths, self.dtypes, rows)

    def check(self, values: Sequence[Tensor], rows: int, what: object) -> None:
        """Refuse values that differ from the description; ``what`` names them.

        Raises:
            ChannelError: Their number, rows, widths or dtypes are not the announced ones.
        """
        if [(value.shape, value.dtype) for value in values] == _plain(
            self.widths, self.dtypes, rows
        ):
            return  # most values have two dimensions
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

    @classmethod
    def of(cls, spec: TapSpec, step: int, micro_batch: int, rows: int) -> Header:
        """Describe one micro-batch's taps, without checksum."""
        return cls(spec.plan_code, spec.source, step, micro_batch, rows, spec.code, 0)

    def pack(self) -> bytes:
        """Write as `HEADER_BYTES` bytes, which carry a checksum of their own."""
        body = _HEADER.pack(_MAGIC, *self)
        return body + _CRC.pack(zlib.crc32(body))

    def check(self, found: bytes, where: object) -> Header:
        """Refuse a slot's header that is not this one, whatever its checksum says of the payload.

        ``where`` names the slot.

        Returns:
            The header that was found.

        Raises:
            ChannelError: It is torn, or describes something else; names each field.
        """
        if found == self.pack():
            return self
        body = found[: _HEADER.size]
        magic, *fields = _HEADER.unpack(body)
        if magic != _MAGIC or found[_HEADER.size :] != _CRC.pack(zlib.crc32(body)):
            raise ChannelError(f"{where}: the slot's header is torn: expected {self}")
        seen = Header(*fields)
        wrong = [
            f"{name}: expected {want!r}, found {have!r}"
            for name, want, have in zip(Header._fields, self, seen, strict=True)
            if want != have and name != "checksum"
        ]
        if wrong:
            raise ChannelError(f"{where}: the slot holds something else; {'; '.join(wrong)}")
        return seen


@functools.lru_cache(maxsize=1024)
def _sizes(widths: tuple[int, ...], dtypes: tuple[torch.dtype, ...], rows: int) -> tuple[int, ...]:
    pairs = zip(widths, dtypes, strict=True)
    return tuple(rows * width * dtype.itemsize for width, dtype in pairs)


@functools.lru_cache(maxsize=1024)
def _plain(
    widths: tuple[int, ...], dtypes: tuple[torch.dtype, ...], rows: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [((rows, width), dtype) for width, dtype in zip(widths, dtypes, strict=True)]


@functools.lru_cache(maxsize=1024)
def _offsets(
    widths: tuple[int, ...], dtypes: tuple[torch.dtype, ...], rows: int
) -> tuple[int, ...]:
    return places_in_turn(map(sealed_bytes, _sizes(widths, dtypes, rows)), LINE)


def places_in_turn(sizes: Iterable[int], alignment: int) -> tuple[int, ...]:
    """Start of each of some sizes, one behind the other at multiples of ``alignment``; and the end of all."""
    aligned = (-(-size // alignment) * alignment for size in sizes)
    return tuple(itertools.accumulate(aligned, initial=0))


def checksum(values: Sequence[Tensor]) -> int:
    """CRC-32 of the values' bytes, never 0."""
    crc = 0
    for value in values:
        plain = value.detach().cpu().contiguous().reshape(-1)
        crc = zlib.crc32(plain.view(torch.uint8).numpy().data, crc)
    return crc or 1


def _rows_and_width(value: Tensor) -> tuple[int, int]:
    if value.ndim == 0:
        return 0, 1
    return value.shape[0], math.prod(value.shape[1:])


def specs_digest(specs: Sequence[TapSpec]) -> str:
    """Hash of a tap list: all stages must have resolved the same one."""
    return hashlib.blake2b(repr(list(specs)).encode(), digest_size=8).hexdigest()

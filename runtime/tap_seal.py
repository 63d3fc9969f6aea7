"""A seal behind the last byte of every value of a tap: what was cut off on its way has none.

A stamp says that a push is over, not that all of it came: a transfer that stops short, or a message of
fewer bytes than were awaited (gloo takes one without a word), would leave old bytes in the slot. So the
source writes 8 bytes more behind each value, part of the same transfer, which hold for this push and
this size alone; the draft's rank looks at them before it reads. They cost a word a value, where a
checksum costs a pass over the payload.
"""

from __future__ import annotations

import torch
from torch import Tensor

SEAL_BYTES = 8
_OF_STAMP, _OF_SIZE = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""Odd factors that make a word of two small numbers which no payload or other seal holds by chance."""


def seal_of(stamp: int, num_bytes: int) -> int:
    """The word behind a value of ``num_bytes``."""
    return (stamp * _OF_STAMP + num_bytes * _OF_SIZE) % (1 << 63)


def seal_at(num_bytes: int) -> int:
    """Where the seal of a value of ``num_bytes`` lies, from the value's start."""
    return -(-num_bytes // SEAL_BYTES) * SEAL_BYTES


def sealed_bytes(num_bytes: int) -> int:
    """Size of a value with its seal; nothing has none."""
    return seal_at(num_bytes) + SEAL_BYTES if num_bytes else 0


def write_seal(memory: Tensor, num_bytes: int, stamp: int) -> None:
    """Seal the value of ``num_bytes`` at the start of ``memory``, uint8 [at least `sealed_bytes`]."""
    if num_bytes:
        _seal(memory, num_bytes).fill_(seal_of(stamp, num_bytes))


def is_whole(memory: Tensor, num_bytes: int, stamp: int) -> bool:
    """Whether the seal of push ``stamp`` is there; waits for the current stream."""
    return not num_bytes or int(_seal(memory, num_bytes)) == seal_of(stamp, num_bytes)


def value_in(memory: Tensor, like: Tensor) -> Tensor:
    """The value at the start of ``memory``, shaped like ``like`` (which may be meta)."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _seal(memory: Tensor, num_bytes: int) -> Tensor:
    at = seal_at(num_bytes)
    return memory[at : at + SEAL_BYTES].view(torch.int64)

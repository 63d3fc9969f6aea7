"""Taps through named POSIX shared memory, without Python's resource tracker.

``multiprocessing.shared_memory`` registers every attachment with a tracker process that unlinks the
name when any one process ends, and cannot be told not to before Python 3.13. These segments are
plain files of /dev/shm: they live as long as a process maps them once the name is unlinked.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Any

from spec_compile.errors import ChannelError

from .mapped_ring import MappedRing, ring_bytes
from .tap_transport import RingLayout, Setting, TapEdge

FOLDER = Path("/dev/shm")
PREFIX = "spec_compile"


class SharedMemory:
    """A `TapTransport` between processes of one host."""

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device
        self._names: list[str] = []

    def offer(self, edge: TapEdge, layout: RingLayout) -> tuple[MappedRing, Any]:
        """Create a segment; its name is the handle."""
        name, buffer = create(ring_bytes(layout))
        self._names.append(name)
        return MappedRing(layout, buffer, self._device), name

    def accept(self, edge: TapEdge, layout: RingLayout, handle: Any) -> tuple[MappedRing, Any]:
        """Map the segment."""
        return MappedRing(layout, attach(str(handle), ring_bytes(layout)), self._device), None

    def settle(self, edge: TapEdge, answer: Any) -> None:
        """Nothing is missing."""

    def withdraw(self) -> None:
        """Unlink all names; mappings stay valid."""
        for name in self._names:
            unlink(name)
        self._names.clear()

    def close(self) -> None:
        """Unlink what is left."""
        self.withdraw()


def create(num_bytes: int) -> tuple[str, mmap.mmap]:
    """Allocate a zeroed segment under a new name; return both.

    Raises:
        ChannelError: The host has no /dev/shm, or no room in it.
    """
    name = f"{PREFIX}_{os.getpid()}_{secrets.token_hex(8)}"
    try:
        handle = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise ChannelError(f"cannot create shared memory in {FOLDER}: {error}") from error
    try:
        # Reserves the pages: writing to a full tmpfs later would be a SIGBUS.
        os.posix_fallocate(handle, 0, num_bytes)
        return name, mmap.mmap(handle, num_bytes)
    except OSError as error:
        unlink(name)
        raise ChannelError(
            f"expected room for {num_bytes} bytes in {FOLDER}, found {error}; enlarge it "
            "(--shm-size in containers) or use fewer tokens per micro-batch"
        ) from error
    finally:
        os.close(handle)


def attach(name: str, num_bytes: int) -> mmap.mmap:
    """Map the segment that a peer created.

    Raises:
        ChannelError: It does not exist here, or has another size.
    """
    try:
        handle = os.open(FOLDER / name, os.O_RDWR)
    except OSError as error:
        raise ChannelError(
            f"cannot map the peer's shared memory {name}: {error}; both ends must run on one "
            "host and see one /dev/shm"
        ) from error
    try:
        found = os.fstat(handle).st_size
        if found != num_bytes:
            raise ChannelError(f"expected {num_bytes} bytes of shared memory, found {found}")
        return mmap.mmap(handle, num_bytes)
    finally:
        os.close(handle)


def unlink(name: str) -> None:
    """Remove the name; mappings stay valid. Unknown names are ignored."""
    (FOLDER / name).unlink(missing_ok=True)

"""Taps through named POSIX shared memory, without Python's resource tracker.

``multiprocessing.shared_memory`` registers every attachment with a tracker process that unlinks the
name when any one process ends, and cannot be told not to before Python 3.13. These segments are
plain files of /dev/shm: they live as long as a process maps them once the name is unlinked.

A process that is killed before it unlinks leaves a name. So a segment's maker locks it, the kernel
drops that lock with the maker's mapping, and whoever makes the next segment removes those that nobody
locks. Process ids would not tell: containers can share memory and count processes apart.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

from spec_compile.errors import ChannelError

from .mapped_ring import MappedRing, ring_bytes
from .tap_transport import RingLayout, Setting, TapEdge

log = logging.getLogger(__name__)

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
    remove_orphans()
    name, handle = _locked_file()
    try:
        # Reserves the pages: writing to a full tmpfs later would be a SIGBUS.
        os.posix_fallocate(handle, 0, num_bytes)
        return name, mmap.mmap(handle, num_bytes)  # holds the lock once the handle is closed
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


def _locked_file() -> tuple[str, int]:
    while True:
        name = f"{PREFIX}_{os.getpid()}_{secrets.token_hex(8)}"
        try:
            handle = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise ChannelError(f"cannot create shared memory in {FOLDER}: {error}") from error
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return name, handle
        os.close(handle)  # removed as an orphan before it was locked


def remove_orphans() -> None:
    """Unlink segments whose maker ended before it could."""
    for path in FOLDER.glob(f"{PREFIX}_*"):
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            continue  # unlinked meanwhile, or another user's
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            path.unlink(missing_ok=True)
            log.info("removed %s, which a process that was killed had left", path)
        finally:
            os.close(handle)

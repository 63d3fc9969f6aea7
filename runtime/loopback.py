"""Tap memory for the ends of a channel that live in one process."""

from __future__ import annotations

import mmap
import secrets
import threading

from spec_compile.errors import ChannelError

_segments: dict[str, mmap.mmap] = {}
_lock = threading.Lock()


class Loopback:
    """Private memory that threads of one process find by name."""

    def create(self, num_bytes: int) -> tuple[str, mmap.mmap]:
        """Allocate a zeroed segment under a new name."""
        name = secrets.token_hex(8)
        buffer = mmap.mmap(-1, num_bytes)
        with _lock:
            _segments[name] = buffer
        return name, buffer

    def attach(self, name: str, num_bytes: int) -> mmap.mmap:
        """Return the segment that another thread created.

        Raises:
            ChannelError: No thread of this process did, or with another size.
        """
        with _lock:
            buffer = _segments.get(name)
        if buffer is None or len(buffer) != num_bytes:
            found = "nothing" if buffer is None else f"{len(buffer)} bytes"
            raise ChannelError(
                f"expected {num_bytes} bytes of loopback memory {name} in this process, found "
                f"{found}; ranks in several processes need tap_transport='shm'"
            )
        return buffer

    def unlink(self, name: str) -> None:
        """Forget the name; both ends keep the memory. Unknown names are ignored."""
        with _lock:
            _segments.pop(name, None)

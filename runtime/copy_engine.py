"""What one-sided communication asks of a device: memory that peers map, copies, and words that order them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

HANDLE_BYTES = 64
"""Size of what a peer needs to map exported memory."""
PAGE_BYTES = 1 << 21
"""What a peer maps should be a multiple of: else copies into it are slower, on an H200 by a quarter (into 1668 MiB
at 2109 GB/s, into 4 KiB more at 1567)."""


class Lane(Protocol):
    """An ordered queue of work on the device; calls return at once."""

    def after(self, other: Lane) -> None:
        """Let later work here wait for everything queued on ``other`` up to now."""

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        """Copy between addresses, own or mapped."""

    def write(self, address: int, value: int) -> None:
        """Store an 8-byte word once all earlier work here is complete and visible to every device."""

    def wait(self, address: int, value: int) -> None:
        """Hold later work back until the 8-byte word is at least ``value``."""

    def idle(self) -> bool:
        """Whether everything queued here up to now is done."""

    def keep(self, x: Tensor) -> None:
        """Let the memory of ``x`` not be used for anything else before work queued here is done."""


class Engine(Protocol):
    """One device. Any thread may call it."""

    @property
    def identity(self) -> str:
        """The same in every process that works on this device, and only there."""

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory that peers can map; returns its address."""

    def free(self, address: int) -> None:
        """Give back what `allocate` returned; may wait for queued work."""

    def export(self, address: int) -> bytes:
        """Return the `HANDLE_BYTES` by which a peer maps an allocation."""

    def map(self, handle: bytes) -> int:
        """Map a peer's allocation; returns its address here."""

    def unmap(self, address: int) -> None:
        """Undo `map`; may wait for queued work."""

    def register(self, address: int, num_bytes: int) -> int:
        """Let the device reach host memory; returns the address that `Lane.write` and `wait` take."""

    def unregister(self, address: int) -> None:
        """Undo `register`, given the host address."""

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """View own memory as uint8 [num_bytes]; the view keeps ``owner`` alive."""

    def new_lane(self) -> Lane:
        """Make a queue of its own."""

    def current_lane(self) -> Lane:
        """The queue of the calling thread's computation."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

"""A device made of host memory and threads: its lanes run later than the calls, as streams do."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from spec_compile.runtime.copy_engine import HANDLE_BYTES, Lane
from spec_compile.runtime.shared_words import fence

DRAIN_S = 2.0
"""How long memory waits for queued work; a lane may be stuck on purpose."""


class PlainLane:
    """A thread that does what was queued, in order; ``delay_s`` before every copy."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.waits = 0
        """How many were asked for."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last = threading.Event()
        self._last.set()
        threading.Thread(target=self._run, daemon=True).start()

    def after(self, other: Lane) -> None:
        assert isinstance(other, PlainLane | DirectLane)
        self.queue(other.mark().wait)

    def mark(self) -> threading.Event:
        reached = threading.Event()
        self.queue(reached.set)
        return reached

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        def work() -> None:
            time.sleep(self.delay_s)
            ctypes.memmove(dst, src, num_bytes)

        self.queue(work)

    def write(self, address: int, value: int) -> None:
        def work() -> None:
            fence()
            ctypes.c_int64.from_address(address).value = value

        self.queue(work)

    def wait(self, address: int, value: int) -> None:
        self.waits += 1

        def work() -> None:
            while ctypes.c_int64.from_address(address).value < value:
                time.sleep(1e-4)

        self.queue(work)

    def idle(self) -> bool:
        return self._last.is_set()

    def keep(self, x: Tensor) -> None:
        self.queue(lambda: x)

    def queue(self, work: Callable[[], object]) -> None:
        self._last = done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._work.put(run)

    def _run(self) -> None:
        while True:
            self._work.get()()


class DirectLane(PlainLane):
    """The caller's own: nothing runs later, so tensors may be looked at."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.waits = 0

    def idle(self) -> bool:
        return True

    def queue(self, work: Callable[[], object]) -> None:
        work()


class PlainEngine:
    """An `Engine` whose memory other processes map, as they map a GPU's; it ends with its process.

    Args:
        delay_s: before every copy on a lane of its own.
        room_bytes: most that can be allocated at once.
        shared: whether it says that all processes have the same device.
        current: the lane of the computation; None: nothing runs later there.
    """

    def __init__(
        self, *, delay_s: float = 0.0, room_bytes: int = 1 << 30, shared: bool = False,
        current: PlainLane | None = None,
    ) -> None:  # fmt: skip
        self.delay_s = delay_s
        self.identity = "one" if shared else str(os.getpid())
        self.room_bytes = room_bytes
        self.mapped: dict[int, tuple[int, mmap.mmap]] = {}
        self.allocated: list[int] = []
        """Sizes, in order."""
        self.freed = 0
        self.current = current or DirectLane()
        self._lanes: list[PlainLane] = []

    def allocate(self, num_bytes: int) -> int:
        if num_bytes > self.room_bytes:
            raise MemoryError(f"no room for {num_bytes} bytes")
        self.allocated.append(num_bytes)
        handle = os.memfd_create("plain_engine")
        os.ftruncate(handle, num_bytes)
        return self._remember(handle)

    def free(self, address: int) -> None:
        self.freed += 1
        self.unmap(address)

    def export(self, address: int) -> bytes:
        handle, _ = self.mapped[address]
        return f"/proc/{os.getpid()}/fd/{handle}".encode().ljust(HANDLE_BYTES)

    def map(self, handle: bytes) -> int:
        return self._remember(os.open(handle.decode().strip(), os.O_RDWR))

    def unmap(self, address: int) -> None:
        for lane in self._lanes:
            lane.mark().wait(
                DRAIN_S
            )  # a thread that copies to memory without a page ends the process
        handle, _ = self.mapped.pop(address)
        os.close(handle)

    def register(self, address: int, num_bytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        return

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def new_lane(self) -> Lane:
        self._lanes.append(PlainLane(self.delay_s))
        return self._lanes[-1]

    @property
    def waits(self) -> int:
        """Waits that its lanes were asked for."""
        return sum(lane.waits for lane in (self.current, *self._lanes))

    def current_lane(self) -> Lane:
        return self.current

    def synchronize(self) -> None:
        return

    def finish(self) -> None:
        """Wait for all that was queued up to now."""
        for lane in (self.current, *self._lanes):
            assert lane.mark().wait(20.0)

    def _remember(self, handle: int) -> int:
        buffer = mmap.mmap(handle, os.fstat(handle).st_size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.mapped[address] = (handle, buffer)
        return address

"""Words of 8 bytes that the hosts and devices of several processes read and write.

Every wait for a word ends: a host's by polling with a deadline, a device's because `WordWatch` looks
after it from another thread. When the step has failed or the deadline has passed, the watch stores
a value that is larger than all others, which lets the device go on; what it computes then is never
used, as every later call raises the failure.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spec_compile.errors import ChannelError

from .control import SocketControl
from .copy_engine import Engine, Lane
from .polling import poll

RELEASED = 1 << 62
"""What ends a device's wait after a failure."""
_TICK_S = 0.25
_RELEASE_S = 0.02


def fence() -> None:
    """Order stores before this call against those after it, for other processes to see.

    A lock's release followed by its acquire, which also AArch64 orders against both sides.
    """
    gate = threading.Lock()
    gate.acquire()
    gate.release()
    gate.acquire()


class SharedWords:
    """A mapped segment as words, registered with the device.

    Args:
        buffer: zeroed by whoever created it.
        engine: the device that reaches it.
    """

    def __init__(self, buffer: mmap.mmap, engine: Engine) -> None:
        self._engine = engine
        self._bytes = memoryview(buffer)
        self._words = self._bytes.cast("q")
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._device = engine.register(self._host, len(buffer))

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def address(self, index: int) -> int:
        """Where the device finds a word."""
        return self._device + 8 * index

    def read(self, first: int, num_bytes: int) -> bytes:
        """Copy bytes out, from a word on."""
        return bytes(self._bytes[8 * first : 8 * first + num_bytes])

    def store(self, first: int, data: bytes) -> None:
        """Copy bytes in, from a word on."""
        self._bytes[8 * first : 8 * first + len(data)] = data

    def close(self) -> None:
        """Take it from the device; no queued work may use it any more."""
        self._engine.unregister(self._host)


@dataclass(frozen=True)
class _DeviceWait:
    words: SharedWords
    index: int
    value: int
    what: str

    @property
    def over(self) -> bool:
        return self.words[self.index] >= self.value


class WordWatch:
    """Ends the waits of one rank.

    Args:
        control: tells of failures and hears of missed deadlines.
        timeout_s: deadline of a host's wait, and of a device's wait since the last one that ended.
    """

    def __init__(self, control: SocketControl, timeout_s: float) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._waits: list[_DeviceWait] = []
        self._lock = threading.Lock()
        self._moved = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="spec_compile word watch", daemon=True
        )
        self._thread.start()

    def until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Poll on the host until ``done``.

        Raises:
            ChannelError: the deadline passed; ``what`` says what was awaited. A failure of a peer
                comes as its own class.
        """
        poll(done, self._control.check, self._timeout_s, what)

    def hold(
        self, lane: Lane, words: SharedWords, index: int, value: int, what: Callable[[], str]
    ) -> None:
        """Hold later work on ``lane`` back until a word is ``value``, and look after that wait.

        Queues nothing where the host finds it already. A device stores a word once its earlier work
        is complete and visible to every device, and what the host launches after it has read the
        word begins later still; so that work sees all that came before the word.
        """
        if words[index] >= value:
            fence()  # the read before the launch, for hosts that do not order them
            return
        self._expect(words, index, value, what())
        lane.wait(words.address(index), value)

    def _expect(self, words: SharedWords, index: int, value: int, what: str) -> None:
        with self._lock:
            if not self._waits:
                self._moved = time.monotonic()
            self._waits.append(_DeviceWait(words, index, value, what))

    def close(self) -> None:
        """Stop watching; idempotent. No queued work may wait any more."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._control.latch.wait(min(_TICK_S, self._timeout_s / 8)):
                self._release()
                self._closed.wait(_RELEASE_S)
            else:
                self._look()

    def _look(self) -> None:
        with self._lock:
            left = [wait for wait in self._waits if not wait.over]
            if len(left) < len(self._waits):
                self._moved = time.monotonic()
            self._waits = left
        if left and time.monotonic() - self._moved > self._timeout_s:
            oldest = left[0]
            self._control.fail(
                ChannelError(
                    f"{oldest.what}: the device waits since {self._timeout_s:g} s for stamp "
                    f"{oldest.value}, found {oldest.words[oldest.index]}; the peer's device does "
                    "not get there"
                )
            )

    def _release(self) -> None:
        """Let the device pass; again and again, as a living peer may still store smaller values."""
        with self._lock:
            for wait in self._waits:
                if not wait.over:
                    wait.words[wait.index] = RELEASED

"""How long a tap takes from the source's device to the draft's.

In a step both hosts run ahead of their devices: the source's host has queued its push before its
device is through with what comes before, and the draft's host has queued the pull. `in_step` measures
what is left then, which is what a step sees. `from_call` measures what a source sees whose device has
nothing else to do: the work of its host is in it.

Both ends look at the clock of their host, which all processes of it share, and at words in its memory
that the devices wait for and store. Where the processes share a GPU they take turns on it, and the
draft's host waits for the payload before it queues anything: both are in the figures.
"""

from __future__ import annotations

import mmap
import os
import time

from spec_compile.errors import ChannelError
from spec_compile.runtime.cuda_ipc_taps import SlotReader
from spec_compile.runtime.shared_words import SharedWords

from .tap_pair import WAIT_S, Pair
from .timing import Timing

WAITED_S = 2e-4
"""How long the reader waits, at least, before what it waits for begins."""
_GATE, _PAST = 0, 8
"""Words: what the source's device waits for, and where the draft's device has come."""


def measure_latency(pair: Pair, num_bytes: int, repeats: int) -> tuple[Timing, Timing]:
    """Microseconds `_Taps.in_step` and `_Taps.from_call`; a quarter of the repeats does not count."""
    taps = _Taps(pair, num_bytes)
    found = []
    # what waits for nothing comes first: whatever the driver does once is done when devices are held
    for step, time_one in enumerate((taps.from_call, taps.in_step)):
        taps.begin(step, repeats)
        samples = []
        for micro_batch in range(repeats):
            pair.meet()
            begun, seen = pair.meet(time_one(micro_batch))
            samples.append((seen - begun) * 1e6)
        found.append(Timing.of(samples[repeats // 4 :]))
    taps.close()
    from_call, in_step = found
    return in_step, from_call


class _Taps:
    """One end of a channel, and two words of its own between this process's host and device."""

    def __init__(self, pair: Pair, num_bytes: int) -> None:
        self._pair = pair
        self._channels, self._values = pair.channels(num_bytes), pair.taps(num_bytes)
        self._words = SharedWords(mmap.mmap(-1, mmap.PAGESIZE), pair.engine)
        self._number = 0

    def begin(self, step: int, repeats: int) -> None:
        """Open a step of ``repeats`` taps."""
        self._channels.begin_step(step, [len(self._values[0])] * repeats)

    def in_step(self, micro_batch: int) -> float:
        """When the source's device was let go on; at the other end, when the device was past the payload.

        The push is queued behind a word, and the pull is queued, before the source's host stores it.
        """
        self._number += 1
        if self._pair.rank == 0:
            lane = self._pair.engine.current_lane()
            lane.wait(self._words.address(_GATE), self._number)
            try:
                self._channels.push(0, micro_batch, self._values)
                self._pair.tell()
                time.sleep(WAITED_S)
                return time.perf_counter()
            finally:  # whatever happens, no device is left held
                self._words[_GATE] = self._number
        if self._shares_device:  # the pull returns when the payload has landed
            self._pair.tell()
            self._pull(micro_batch)
        else:
            self._pull(micro_batch)
            self._pair.tell()
        return self._past(micro_batch)

    def from_call(self, micro_batch: int) -> float:
        """When push was called; at the other end, when the device was past the payload.

        The draft's host waits in its pull before.
        """
        self._number += 1
        if self._pair.rank == 0:
            time.sleep(WAITED_S)
            at = time.perf_counter()
            self._channels.push(0, micro_batch, self._values)
            return at
        self._pull(micro_batch)
        return self._past(micro_batch)

    def close(self) -> None:
        """Close the channel, and take the words from the device."""
        self._pair.meet()
        self._channels.close()
        self._words.close()

    def _pull(self, micro_batch: int) -> None:
        self._channels.pull(0, micro_batch, self._values)
        self._pair.engine.current_lane().write(self._words.address(_PAST), self._number)

    def _past(self, micro_batch: int) -> float:
        end = time.perf_counter() + WAIT_S
        while self._words[_PAST] < self._number:
            os.sched_yield()
            if time.perf_counter() > end:
                raise ChannelError(
                    f"no payload within {WAIT_S:g} s: the draft's device stands still"
                )
        at = time.perf_counter()
        self._channels.release(micro_batch)
        return at

    @property
    def _shares_device(self) -> bool:
        reader = self._channels.rings.readers[0]
        assert isinstance(reader, SlotReader), "the channel is over CUDA IPC"
        return reader.shares_device

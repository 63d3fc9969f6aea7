"""Taps over CUDA IPC: slots in the memory of the draft's device, filled by the source's copy engine.

Words and headers lie in shared host memory that both devices reach (`cuda_ipc_slots`). Each word has a
twin: the host's says what is queued, the device's what is done.

The source's host waits for credit, its device for drained; the draft's host for posted, its device
for landed. So neither host waits for a device, and a push overlaps the computation on both sides.

A device is asked only for what its host cannot do: it waits for no word that the host finds already,
and a draft's host whose stream is idle drains a slot itself. Processes that share a GPU take turns on
it, and each such request would cost a turn, which is longer than most copies. There the draft's host
also waits for landed, as its device could not go on meanwhile. That ends as well: all that a device
has been told to wait for is queued on some device before.

That a payload is whole takes no word in it: landed follows the copies on their stream, which a copy
that fails ends, and the source's host says how many bytes it has queued.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ChannelError, ConfigError

from . import shared_memory
from .control import SocketControl
from .copy_engine import Engine, Lane
from .cuda_driver import CudaEngine
from .cuda_ipc_slots import (
    CLOSED,
    CREDIT,
    DRAINED,
    Place,
    Slots,
    places_of,
    slot_bytes,
    starts,
    words_bytes,
)
from .shared_words import SharedWords, WordWatch, fence
from .tap_slot import HEADER_BYTES
from .tap_transport import RingLayout, Setting, TapEdge, Wait

GOODBYE_S = 1.0
"""How long an orderly end waits until the source has unmapped the slots."""


class CudaIpcTaps:
    """A `TapTransport` between processes of one host, on one GPU or several.

    Raises:
        ConfigError: the taps are not on a GPU, or all ranks are threads of one process.
    """

    def __init__(self, setting: Setting, engine: Engine | None = None) -> None:
        if not isinstance(setting.control, SocketControl):
            raise ConfigError(
                "tap transport cuda_ipc joins processes; use auto or loopback in one process"
            )
        if engine is None and setting.device.type != "cuda":
            raise ConfigError(f"tap transport cuda_ipc needs CUDA devices, found {setting.device}")
        self._control = setting.control
        self._engine = engine or CudaEngine(setting.device)
        self._watch = WordWatch(setting.control, setting.timeout_s)
        self._names: list[str] = []
        self._offered: dict[TapEdge, SlotReader] = {}

    def offer(self, edge: TapEdge, layout: RingLayout) -> tuple[SlotReader, Any]:
        """Allocate slots on this rank's device, and the words in shared memory."""
        name, buffer = shared_memory.create(words_bytes(layout))
        self._names.append(name)
        words = SharedWords(buffer, self._engine)
        try:
            slots = Slots(self._engine, layout)
        except ChannelError:
            words.close()
            raise
        handle = {"words": name, "slots": self._engine.export(slots.address).hex()}
        reader = SlotReader(words, slots, layout, self._engine, self._watch, self._control)
        self._offered[edge] = reader
        return reader, handle

    def accept(self, edge: TapEdge, layout: RingLayout, handle: Any) -> tuple[SlotWriter, Any]:
        """Map both; the answer tells which device writes."""
        buffer = shared_memory.attach(str(handle["words"]), words_bytes(layout))
        words = SharedWords(buffer, self._engine)
        try:
            address = self._engine.map(bytes.fromhex(handle["slots"]))
        except ChannelError:
            words.close()
            raise
        writer = SlotWriter(words, address, layout, self._engine, self._watch)
        return writer, {"device": self._engine.identity}

    def settle(self, edge: TapEdge, answer: Any) -> None:
        """Tell the reader whether both ends share a device."""
        self._offered.pop(edge).shares_device = answer["device"] == self._engine.identity

    def withdraw(self) -> None:
        """Unlink all names; mappings stay valid."""
        for name in self._names:
            shared_memory.unlink(name)
        self._names.clear()

    def close(self) -> None:
        """Stop the watch; all rings are closed."""
        self.withdraw()
        self._watch.close()


class SlotWriter:
    """The source's end: a `TapWriter`."""

    def __init__(
        self,
        words: SharedWords,
        address: int,
        layout: RingLayout,
        engine: Engine,
        watch: WordWatch,
    ) -> None:
        self._words = words
        self._address = address
        self._layout = layout
        self._engine = engine
        self._watch = watch
        self._places = places_of(layout)
        self._lane = engine.new_lane()
        self._credit = 0
        self._closed = False

    def begin(self, credit: int, num_pushes: int) -> None:
        """Nothing to prepare."""

    def wait_credit(self, expected: int, wait: Wait) -> None:
        """Wait until the reader's host has given credit; its device may still be reading."""
        wait.until(lambda: self._words[CREDIT], expected, "credit")
        self._credit = expected

    def push(
        self, slot: int, stamp: int, header: bytes, values: Sequence[Tensor], wait: Wait
    ) -> None:
        """Queue the copies, and the stamp behind them; the current stream goes on at once.

        The values' memory is kept until they are copied; nothing may write into it.
        """
        rows = values[0].shape[0] if values else 0
        words, place, lane, queued = self._words, self._places[slot], self._lane, 0
        start = self._address + place.payload
        held = [x if x.is_contiguous() else x.detach().contiguous() for x in values]
        lane.after(self._engine.current_lane())
        self._watch.hold(lane, words, DRAINED, self._credit, lambda: f"{wait}, room in its slot")
        for value, at in zip(held, starts(self._layout.spec, rows), strict=False):
            if num_bytes := value.nbytes:
                lane.copy(start + at, value.data_ptr(), num_bytes)
                lane.keep(value)
                queued += num_bytes
        lane.write(words.address(place.landed), stamp)
        words[place.queued] = queued
        words.store(place.header, header)
        fence()
        words[place.posted] = stamp

    def close(self) -> None:
        """Unmap the slots; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._engine.synchronize()
        self._engine.unmap(self._address)
        self._words[CLOSED] = 1
        self._words.close()


class SlotReader:
    """The draft's end: a `TapReader`."""

    def __init__(
        self,
        words: SharedWords,
        slots: Slots,
        layout: RingLayout,
        engine: Engine,
        watch: WordWatch,
        control: SocketControl,
    ) -> None:
        self._words = words
        self._slots: Slots | None = slots
        self._layout = layout
        self._engine = engine
        self._watch = watch
        self._control = control
        self._places = places_of(layout)
        self._views: list[tuple[int, list[Tensor]]] = [(-1, [])] * layout.depth
        self._wait: Wait | None = None
        self._told = 0
        self._teller: Lane | None = None
        self.shares_device = False
        """Whether the writer works on the same device, in another process."""

    def begin(self, credit: int, num_pushes: int) -> None:
        """Nothing to prepare."""

    def wait_stamp(self, slot: int, expected: int, wait: Wait) -> int:
        """Wait until the writer's host has queued the push; on a shared device, until it is done."""
        self._wait, place = wait, self._places[slot]
        seen = wait.until(lambda: self._words[place.posted], expected, "stamp")
        if self.shares_device:
            wait.until(lambda: self._words[place.landed], expected, "payload")
        fence()
        return seen

    def stamp(self, slot: int) -> int:
        """The push that is queued into a slot."""
        return self._words[self._places[slot].posted]

    def header(self, slot: int) -> bytes:
        """What the writer's host says about it."""
        return self._words.read(self._places[slot].header, HEADER_BYTES)

    def values(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """The slot's values in place; the current stream waits until they have landed."""
        place = self._places[slot]
        self._watch.hold(
            self._engine.current_lane(), self._words, place.landed, self.stamp(slot),
            lambda: f"{self._wait}, payload",
        )  # fmt: skip
        of_rows, views = self._views[slot]
        if of_rows != rows or [x.shape for x in views] != [x.shape for x in like]:
            views = self._make_views(place, rows, like)
            self._views[slot] = rows, views
        return [view.detach() for view in views]

    @torch.inference_mode(False)  # they serve later calls too, which may compute gradients
    def _make_views(self, place: Place, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        assert self._slots is not None, "the taps are open"
        return [
            self._slots.tensor(place.payload + at, x)
            for x, at in zip(like, starts(self._layout.spec, rows), strict=False)
        ]

    def cut(self, slot: int, stamp: int, rows: int) -> list[int]:
        """All values, when other than all their bytes were queued."""
        sizes = self._layout.spec.sizes(rows)
        queued = self._words[self._places[slot].queued]
        return [] if queued == sum(sizes) else list(range(len(sizes)))

    def give_credit(self, credit: int) -> None:
        """Give slots back, once the current stream has done what it was given so far."""
        lane = self._engine.current_lane()
        if self._words[DRAINED] >= self._told and lane.idle():
            self._words[DRAINED] = credit
        else:
            if self._teller not in (None, lane):
                lane.after(self._teller)  # this credit is for the slots of earlier ones as well
            lane.write(self._words.address(DRAINED), credit)
            self._told, self._teller = credit, lane
        fence()
        self._words[CREDIT] = credit

    def poison(self, slot: int) -> None:
        """Overwrite the payload with NaNs."""
        assert self._slots is not None, "the taps are open"
        size = slot_bytes(self._layout)
        like = torch.empty(size, dtype=torch.uint8, device="meta")
        self._slots.tensor(slot * size, like).fill_(0xFF)

    def close(self) -> None:
        """Let go of the slots, which live as long as tensors that were pulled; idempotent."""
        if self._slots is None:
            return
        self._engine.synchronize()
        end = time.monotonic() + GOODBYE_S
        while not self._words[CLOSED] and time.monotonic() < end:
            if self._control.latch.is_set() or self._control.left():
                break
            time.sleep(1e-3)
        self._slots = None
        self._views.clear()
        self._words.close()

"""Taps between stages of one process: threads, or several stages of one rank; on any device."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

from .tap_transport import RingLayout, Setting, TapEdge, Wait

_rings: dict[str, LocalRing] = {}
_lock = threading.Lock()


class LocalRing:
    """Both ends of a ring in this process's memory; a `TapWriter` and a `TapReader`.

    Words are Python ints: threads see them in the order of the interpreter's lock. On CUDA every word
    comes with an event, so that ends may use different streams.
    """

    def __init__(self, layout: RingLayout, device: torch.device) -> None:
        self.layout = layout
        spec, rows = layout.spec, layout.capacity_rows
        # a storage of its own a value: an operator may not return two views of one
        self.memory = [
            [
                torch.zeros(rows * width, dtype=dtype, device=device)
                for width, dtype in zip(spec.widths, spec.dtypes, strict=True)
            ]
            for _ in range(layout.depth)
        ]
        self.device = device
        self.headers = [b""] * layout.depth
        self.stamps = [0] * layout.depth
        self.written = [[0]] * layout.depth
        self.credit = 0
        self._written: list[torch.cuda.Event | None] = [None] * layout.depth
        self._returned: torch.cuda.Event | None = None

    def begin(self, credit: int, num_pushes: int) -> None:
        """Nothing to prepare."""

    def wait_credit(self, expected: int, wait: Wait) -> None:
        """Poll the credit."""
        wait.until(lambda: self.credit, expected, "credit")
        _join(self._returned)

    def push(
        self, slot: int, stamp: int, header: bytes, values: Sequence[Tensor], wait: Wait
    ) -> None:
        """Fill a slot; the stamp last."""
        for place, value in zip(self._places(slot, values), values, strict=True):
            place.copy_(value.detach())
        self.written[slot] = [value.nbytes for value in values]
        self.headers[slot] = header
        self._written[slot] = _mark(self.device)
        self.stamps[slot] = stamp

    def wait_stamp(self, slot: int, expected: int, wait: Wait) -> int:
        """Poll the stamp."""
        seen = wait.until(lambda: self.stamps[slot], expected, "stamp")
        _join(self._written[slot])
        return seen

    def stamp(self, slot: int) -> int:
        """The stamp of a slot."""
        return self.stamps[slot]

    def header(self, slot: int) -> bytes:
        """The header's bytes."""
        return self.headers[slot]

    def values(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """The slot's values in place."""
        return self._places(slot, like)

    def cut(self, slot: int, stamp: int, rows: int) -> list[int]:
        """Values of another size; inside a process a copy is whole or raises."""
        pairs = zip(self.written[slot], self.layout.spec.sizes(rows), strict=True)
        return [i for i, (found, expected) in enumerate(pairs) if found != expected]

    def give_credit(self, credit: int) -> None:
        """Raise the credit."""
        self._returned = _mark(self.device)
        self.credit = credit

    def poison(self, slot: int) -> None:
        """Overwrite the payload with NaNs."""
        for memory in self.memory[slot]:
            memory.view(torch.uint8).fill_(255)

    def close(self) -> None:
        """Nothing to free: memory goes with the last tensor that was pulled."""

    def _places(self, slot: int, like: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.memory[slot], like, strict=True)
        return [memory[: x.numel()].view(x.shape) for memory, x in pairs]


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Record what the current stream was given so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _join(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class Loopback:
    """A `TapTransport` inside one process."""

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device
        self._names: list[str] = []

    def offer(self, edge: TapEdge, layout: RingLayout) -> tuple[LocalRing, Any]:
        """Make a ring that this process finds under a new name."""
        name, ring = secrets.token_hex(8), LocalRing(layout, self._device)
        with _lock:
            _rings[name] = ring
        self._names.append(name)
        return ring, name

    def accept(self, edge: TapEdge, layout: RingLayout, handle: Any) -> tuple[LocalRing, Any]:
        """Find the ring."""
        with _lock:
            ring = _rings.get(str(handle))
        if ring is None or ring.layout != layout:
            found = "nothing" if ring is None else f"{ring.layout}"
            raise ChannelError(
                f"{edge}: expected {layout} under {handle} in this process, found {found}; ranks "
                "in several processes need tap_transport='shm', or 'auto'"
            )
        return ring, None

    def settle(self, edge: TapEdge, answer: Any) -> None:
        """Nothing is missing."""

    def withdraw(self) -> None:
        """Forget the names; both ends keep the ring."""
        with _lock:
            for name in self._names:
                _rings.pop(name, None)
        self._names.clear()

    def close(self) -> None:
        """Forget what is left."""
        self.withdraw()

"""What a tap channel needs of a transport: one ring of slots an edge, written one-sidedly.

Set-up, driven by `tap_setup.map_rings` on all ranks at once: the draft's rank `TapTransport.offer`s a
ring, its handle travels over the control plane, the source's rank `TapTransport.accept`s it, its answer
travels back and is `TapTransport.settle`d. `TapTransport.withdraw` then removes every name, also after
an error.

A step: both ends `begin`; the source waits for credit, then pushes; the draft's rank waits for the
stamp, reads in place, and gives credit. Which number is expected when, and what a header must say, is
the business of `taps.TapChannels` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

from .fabric import Control
from .polling import Backoff
from .tap_slot import TapSpec


@dataclass(frozen=True)
class TapEdge:
    """One channel of one pipeline."""

    source: int
    """Stage that pushes."""
    last: int
    """Stage that pulls."""
    lane: str
    """Its pipeline, such as ``dp0 cp1``."""
    writer: int
    """Global rank of the source stage."""
    reader: int
    """Global rank of the last stage."""

    @property
    def name(self) -> str:
        """Unique in the world, such as ``dp0 cp1 0->2``."""
        return f"{self.lane} {self.source}->{self.last}"

    def __str__(self) -> str:
        return f"tap channel {self.source}->{self.last} ({self.lane})"


@dataclass(frozen=True)
class RingLayout:
    """Size of a ring."""

    spec: TapSpec
    depth: int
    """Slots."""
    capacity_rows: int
    """Most rows of a micro-batch in a slot."""

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of one slot's values and seals, each value aligned to `tap_slot.LINE`."""
        return self.spec.offsets(self.capacity_rows)[-1]


@dataclass(frozen=True)
class Setting:
    """Where a transport works."""

    control: Control
    device: torch.device
    """Where taps are pushed from and pulled to."""
    timeout_s: float
    """Deadline of every wait."""
    pipelines: tuple[tuple[int, ...], ...]
    """Global ranks of every pipeline, in one order on all ranks: for collective set-up."""


@dataclass(slots=True)
class Wait:
    """One wait: what for, until when, and the failure word that ends it early.

    Its text, which errors begin with, is made when one asks for it.
    """

    channel: tuple[int, int, str]
    """Stage that pushes, stage that pulls, and their pipeline."""
    step: int
    micro_batch: int
    control: Control
    timeout_s: float

    def __str__(self) -> str:
        source, last, lane = self.channel
        return (
            f"tap channel {source}->{last} ({lane}), step {self.step}, micro-batch "
            f"{self.micro_batch}"
        )

    def until(self, read: Callable[[], int], expected: int, what: str) -> int:
        """Poll ``read`` until it is at least ``expected``, with the pauses of a `Backoff`.

        Returns:
            The number that ended the wait.

        Raises:
            ChannelError: the deadline passed. A failure that a peer published comes as its own class.
        """
        if (seen := read()) >= expected:
            return seen
        backoff = Backoff()
        while (seen := read()) < expected:
            self.control.check()
            if backoff.pause() > self.timeout_s:
                raise self.missed(what, expected, seen)
        return seen

    def missed(self, what: str, expected: int, seen: int) -> ChannelError:
        """Make the error of a wait that came to nothing."""
        return ChannelError(
            f"{self}: no {what} within {self.timeout_s:g} s: expected {expected} (push "
            f"{push_number(expected)} of this step), found {seen}; the other end stopped, or does "
            "not run the same schedule"
        )


PUSH_BITS = 20
"""A stamp is ``step serial << PUSH_BITS | push number``; credits are stamps too."""


def push_number(stamp: int) -> int:
    """The push of a stamp, counted from 1."""
    return stamp % (1 << PUSH_BITS)


class TapWriter(Protocol):
    """The source's end of a ring."""

    def begin(self, credit: int, num_pushes: int) -> None:
        """Open a step of ``num_pushes``; ``credit`` is the stamp of its push 0, and will be given."""

    def wait_credit(self, expected: int, wait: Wait) -> None:
        """Return once the reader has given credit up to ``expected``; called in rising order."""

    def push(
        self, slot: int, stamp: int, header: bytes, values: Sequence[Tensor], wait: Wait
    ) -> None:
        """Write values, each with its proof, then header, then stamp. They may be changed afterwards.

        On CUDA "afterwards" is in the order of the current stream: the transport may copy on the
        current stream, or make its own stream wait for it and the current one for the end.
        """

    def close(self) -> None:
        """Free this end; idempotent."""


class TapReader(Protocol):
    """The draft's end of a ring."""

    def begin(self, credit: int, num_pushes: int) -> None:
        """Open a step of ``num_pushes``; ``credit``, the stamp of its push 0, is given next."""

    def wait_stamp(self, slot: int, expected: int, wait: Wait) -> int:
        """Return the stamp of a slot once it is at least ``expected``."""

    def stamp(self, slot: int) -> int:
        """The stamp of a slot as it is now, without waiting."""

    def header(self, slot: int) -> bytes:
        """The header of a slot whose stamp was seen."""

    def values(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """The values in place, shaped like ``like`` (which may be meta), in separate storages.

        On CUDA the current stream may use them from here on.
        """

    def cut(self, slot: int, stamp: int, rows: int) -> list[int]:
        """Indices of values that push ``stamp`` has not brought whole; asked once, after `values`."""

    def give_credit(self, credit: int) -> None:
        """Let the writer reuse slots up to push ``credit``; rising. Never blocks.

        On CUDA: once the current stream has done what it was given so far.
        """

    def poison(self, slot: int) -> None:
        """Overwrite a slot's values with NaNs, so that a use after release shows; for debugging."""

    def close(self) -> None:
        """Free this end; idempotent. Tensors that were pulled keep their memory, where it is local."""


class TapTransport(Protocol):
    """One way of moving taps; one object a rank. Built by ``(setting: Setting)``."""

    def offer(self, edge: TapEdge, layout: RingLayout) -> tuple[TapReader, Any]:
        """Allocate the ring of an edge on the draft's rank; return its end and a JSON-able handle.

        Raises:
            ChannelError: there is no room, or the transport cannot work here.
        """

    def accept(self, edge: TapEdge, layout: RingLayout, handle: Any) -> tuple[TapWriter, Any]:
        """Map the ring on the source's rank; return its end and a JSON-able answer (or None).

        Raises:
            ChannelError: the ring cannot be reached from here.
        """

    def settle(self, edge: TapEdge, answer: Any) -> None:
        """Take the answer on the draft's rank, before any push."""

    def withdraw(self) -> None:
        """Remove every name that was offered, so that a kill later on leaves nothing; idempotent."""

    def close(self) -> None:
        """Free what the rings of this rank share; idempotent. Ends are closed before."""

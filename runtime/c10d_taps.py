"""Taps as messages over a c10d group of their own: gloo, or NCCL between GPUs.

The slowest transport, and the one that needs nothing: a payload moves when the draft's rank asks for
it. Credits and headers travel by gloo, also on CUDA, so that no NCCL send waits behind a receive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_compile.errors import ChannelError

from .control import SocketControl
from .gloo import GlooFabric
from .tap_seal import is_whole, sealed_bytes, value_in, write_seal
from .tap_slot import HEADER_BYTES
from .tap_transport import RingLayout, Setting, TapEdge, Wait

STAMP_BYTES = 8
LANES = 8
"""Tags of one source stage: its words, its credits, then its values."""


class C10dWriter:
    """The source's end: one message for stamp and header, one a value."""

    def __init__(
        self, layout: RingLayout, peer: int, words: GlooFabric, values: GlooFabric
    ) -> None:
        self._tag = LANES * layout.spec.source
        self._peer, self._words, self._values = peer, words, values
        self._staging = [_slot(layout, values.device) for _ in range(layout.depth)]
        self._credit = 0

    def begin(self, credit: int, num_pushes: int) -> None:
        """Wait until all messages of the step before were taken, as they were when it ended."""
        self._words.flush()
        self._values.flush()
        self._credit = credit

    def wait_credit(self, expected: int, wait: Wait) -> None:
        """Receive credits up to the expected one."""
        while self._credit < expected:
            with _naming(wait):
                word = self._words.recv((1,), torch.int64, self._peer, self._tag + 1)
            self._credit = int(word)

    def push(
        self, slot: int, stamp: int, header: bytes, values: Sequence[Tensor], wait: Wait
    ) -> None:
        """Start sending; staged, as the caller may change what it gave."""
        word = bytearray(stamp.to_bytes(STAMP_BYTES, "little") + header)
        with _naming(wait):
            self._words.send(torch.frombuffer(word, dtype=torch.uint8), self._peer, self._tag)
            for i, (place, value) in enumerate(zip(self._staging[slot], values, strict=True)):
                value_in(place, value).copy_(value.detach())
                write_seal(place, value.nbytes, stamp)
                staged = place[: sealed_bytes(value.nbytes)]
                self._values.send(staged, self._peer, self._tag + 2 + i)

    def close(self) -> None:
        """Nothing of its own to free."""


class C10dReader:
    """The draft's end."""

    def __init__(
        self, layout: RingLayout, peer: int, words: GlooFabric, values: GlooFabric
    ) -> None:
        self._tag = LANES * layout.spec.source
        self._peer, self._words, self._values = peer, words, values
        self._layout = layout
        self._taken: list[list[Tensor]] = [[] for _ in range(layout.depth)]
        self._stamps = [0] * layout.depth
        self._headers = [b""] * layout.depth
        self._credit = 0
        self._awaited = 0
        self._wait: Wait | None = None

    def begin(self, credit: int, num_pushes: int) -> None:
        """Note which credits the writer will wait for: no other is sent."""
        self._words.flush()
        self._credit, self._awaited = credit, credit + max(0, num_pushes - self._layout.depth)

    def wait_stamp(self, slot: int, expected: int, wait: Wait) -> int:
        """Receive stamp and header of the next push."""
        with _naming(wait):
            word = self._words.recv(
                (STAMP_BYTES + HEADER_BYTES,), torch.uint8, self._peer, self._tag
            )
        found = bytes(word.numpy())
        self._wait = wait
        self._stamps[slot] = int.from_bytes(found[:STAMP_BYTES], "little")
        self._headers[slot] = found[STAMP_BYTES:]
        return self._stamps[slot]

    def stamp(self, slot: int) -> int:
        """The stamp that came last."""
        return self._stamps[slot]

    def header(self, slot: int) -> bytes:
        """The header that came with it."""
        return self._headers[slot]

    def values(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Receive the values into memory of their own."""
        assert self._wait is not None, "values follow their stamp"
        with _naming(self._wait):
            self._taken[slot] = [
                self._values.recv((sealed_bytes(n),), torch.uint8, self._peer, self._tag + 2 + i)
                for i, n in enumerate(self._layout.spec.sizes(rows))
            ]
        return [value_in(x, y) for x, y in zip(self._taken[slot], like, strict=True)]

    def cut(self, slot: int, stamp: int, rows: int) -> list[int]:
        """Values without the seal of this push; on a GPU none is looked at, as the host would wait."""
        pairs = enumerate(zip(self._taken[slot], self._layout.spec.sizes(rows), strict=True))
        return [i for i, (x, n) in pairs if x.is_cpu and not is_whole(x, n, stamp)]

    def give_credit(self, credit: int) -> None:
        """Send one message a credit that the writer waits for."""
        while self._credit < min(credit, self._awaited):
            self._credit += 1
            word = torch.tensor([self._credit], dtype=torch.int64)
            self._words.send(word, self._peer, self._tag + 1)

    def poison(self, slot: int) -> None:
        """Overwrite what was received with NaNs."""
        for value in self._taken[slot]:
            value.fill_(255)

    def close(self) -> None:
        """Drop what was received."""
        self._taken = []


class C10dTaps:
    """A `TapTransport` between any processes of one torch.distributed world."""

    def __init__(self, setting: Setting) -> None:
        control = setting.control
        if not isinstance(control, SocketControl) or not dist.is_initialized():
            raise ChannelError(
                "tap_transport='c10d' needs ranks in several processes that torch.distributed joins; use "
                "'auto', or start with torchrun"
            )
        self._fabrics: dict[str, GlooFabric] = {}
        self._ranks: tuple[int, ...] = ()
        kinds = ["cpu"] + (["cuda"] if setting.device.type == "cuda" else [])
        for ranks in setting.pipelines:
            for kind in kinds:  # every rank takes part in every group, in one order
                group = _new_group(list(ranks), kind, setting.timeout_s)
                if group is None or control.rank not in ranks:
                    continue
                device = setting.device if kind == "cuda" else torch.device("cpu")
                self._ranks = ranks
                self._fabrics[kind] = GlooFabric(
                    f"taps ({kind})", group, control, device=device, timeout_s=setting.timeout_s
                )

    def offer(self, edge: TapEdge, layout: RingLayout) -> tuple[C10dReader, Any]:
        """Make the reading end; there is nothing to map."""
        return C10dReader(layout, self._ranks.index(edge.writer), *self._pair(layout)), None

    def accept(self, edge: TapEdge, layout: RingLayout, handle: Any) -> tuple[C10dWriter, Any]:
        """Make the writing end."""
        return C10dWriter(layout, self._ranks.index(edge.reader), *self._pair(layout)), None

    def settle(self, edge: TapEdge, answer: Any) -> None:
        """Nothing is missing."""

    def withdraw(self) -> None:
        """There are no names."""

    def close(self) -> None:
        """Destroy the groups."""
        for fabric in self._fabrics.values():
            fabric.close()

    def _pair(self, layout: RingLayout) -> tuple[GlooFabric, GlooFabric]:
        if len(layout.spec.widths) > LANES - 2:
            raise ChannelError(
                f"tap_transport='c10d' carries {LANES - 2} values a stage, found {layout.spec.widths}"
            )
        words = self._fabrics["cpu"]
        return words, self._fabrics.get("cuda", words)


@contextlib.contextmanager
def _naming(wait: Wait) -> Iterator[None]:
    """Say on which channel a fabric's own error happened."""
    try:
        yield
    except ChannelError as error:
        raise ChannelError(f"{wait}: {error}") from error


def _slot(layout: RingLayout, device: torch.device) -> list[Tensor]:
    sizes = layout.spec.sizes(layout.capacity_rows)
    return [torch.empty(sealed_bytes(n), dtype=torch.uint8, device=device) for n in sizes]


def _new_group(ranks: list[int], kind: str, timeout_s: float) -> dist.ProcessGroup | None:
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
    except RuntimeError as error:
        raise ChannelError(f"could not make a group of ranks {ranks} for taps: {error}") from error
    return group if isinstance(group, dist.ProcessGroup) else None

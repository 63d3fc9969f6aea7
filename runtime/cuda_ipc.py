"""A fabric between processes of one host: copies into memory of the peer, by copy engines.

It works on one GPU, where NCCL refuses several ranks, and between GPUs, where a copy engine takes no
multiprocessor from the computation that it overlaps.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

from . import shared_memory
from .collectives import COLLECTIVE, Message, PairwiseFabric
from .control import SocketControl
from .copy_engine import Engine
from .one_sided import BLOCK_WORDS, Block, Inbox, Outbox
from .shared_words import SharedWords, WordWatch

GOODBYE_S = 1.0
"""How long an orderly end waits for peers that still map this rank's memory."""
_SUBJECT = "grow"
log = logging.getLogger(__name__)


class CannotShareError(ChannelError):
    """Some rank cannot map the memory of another; raised on all of them."""


class CudaIpcFabric(PairwiseFabric):
    """A group of processes of one host.

    Calls return when their work is queued on the current stream, as usual with CUDA; a value
    received may be used at once there, and a value sent may be freed. `flush` waits until all
    peers have queued what takes it.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        device: torch.device,
        control: SocketControl,
        boxes: Boxes,
    ) -> None:
        super().__init__(name, list(ranks).index(control.rank), len(ranks), device, control.latch)
        self._out = [boxes.outboxes.get((name, r)) for r in ranks]
        self._in = [boxes.inboxes.get((name, r)) for r in ranks]
        self._boxes = boxes

    def close(self) -> None:
        """Leave; the memory goes when all fabrics of this rank are closed. Idempotent."""
        super().close()
        self._boxes.leave(self.name)

    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for dst, x in sends:
            self._post(x, dst, COLLECTIVE)
        for src, out in receives:
            self._take(out, src, COLLECTIVE)

    def _post(self, x: Tensor, dst: int, lane: int) -> None:
        box = self._out[dst]
        assert box is not None
        with self._breaking():
            box.post(self._on_device(x), lane)

    def _take(self, out: Tensor, src: int, lane: int) -> None:
        box = self._in[src]
        assert box is not None
        with self._breaking():
            box.take(self._on_device(out), lane)
        # what came in was computed after our own earlier messages had gone: this costs no wait
        self._join()

    def _drain(self) -> None:
        with self._breaking():
            for box in self._out:
                if box is not None:
                    box.drain()
        self._join()

    def _join(self) -> None:
        for box in self._out:
            if box is not None:
                box.join()

    def _on_device(self, x: Tensor) -> Tensor:
        if x.device != self.device:
            raise ChannelError(
                f"fabric {self.name!r} moves tensors of {self.device}, found {x.device}"
            )
        return x

    @contextlib.contextmanager
    def _breaking(self) -> Any:
        try:
            yield
        except Exception as error:
            self._broken = self._broken or str(error)
            raise


class Boxes:
    """All boxes of one rank, for all its fabrics; made by `connect`."""

    def __init__(self, control: SocketControl, engine: Engine, timeout_s: float) -> None:
        self.outboxes: dict[tuple[str, int], Outbox] = {}
        """By fabric and global rank of the peer."""
        self.inboxes: dict[tuple[str, int], Inbox] = {}
        self._control = control
        self._engine = engine
        self._watch = WordWatch(control, timeout_s)
        self._segments: list[SharedWords] = []
        self._open: set[str] = set()
        self._closed = False
        control.listen(_SUBJECT, self._grow)

    def offer(self, name: str, ranks: Sequence[int], buffer: mmap.mmap) -> None:
        """Make the receiving ends of a group in a segment of this rank."""
        words = self._keep(buffer)
        for position, rank in enumerate(ranks):
            if rank != self._control.rank:
                label = self._label(name, rank, self._control.rank)
                block = Block(words, position)
                self.inboxes[name, rank] = Inbox(block, self._engine, self._watch, label)

    def accept(self, name: str, ranks: Sequence[int], peer: int, buffer: mmap.mmap) -> None:
        """Make the sending end towards a peer, in the segment that it offered."""
        own = self._control.rank
        block = Block(self._keep(buffer), list(ranks).index(own))
        label = self._label(name, own, peer)
        box = Outbox(
            block, self._engine, self._watch,
            lambda: self._control.tell(peer, _SUBJECT, {"fabric": name, "sender": own}), label,
        )  # fmt: skip
        box.connect()
        self.outboxes[name, peer] = box
        self._open.add(name)

    def leave(self, name: str) -> None:
        """Close one fabric; the last one frees everything."""
        self._open.discard(name)
        if not self._open:
            self.close()

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._engine.synchronize()
            for outbox in self.outboxes.values():
                outbox.close()
            self._wait_for_peers()
            for inbox in self.inboxes.values():
                inbox.close()
        except (ChannelError, RuntimeError) as error:  # a broken device: it ends with the process
            log.warning("could not free the memory of the CUDA IPC fabrics: %s", error)
        self._watch.close()
        for words in self._segments:
            with contextlib.suppress(ChannelError):
                words.close()

    def _wait_for_peers(self) -> None:
        """Memory should not be freed under a peer that maps it; one that died maps nothing."""
        end = time.monotonic() + GOODBYE_S
        while time.monotonic() < end and not self._control.latch.is_set():
            gone = self._control.left()
            if all(rank in gone or box.released for (_, rank), box in self.inboxes.items()):
                return
            time.sleep(0.002)

    def _keep(self, buffer: mmap.mmap) -> SharedWords:
        words = SharedWords(buffer, self._engine)
        self._segments.append(words)
        return words

    def _grow(self, note: Any) -> None:
        self.inboxes[str(note["fabric"]), int(note["sender"])].grow()

    def _label(self, name: str, src: int, dst: int) -> str:
        return f"fabric {name!r}, rank {src} -> rank {dst}"


def connect(
    control: SocketControl,
    groups: Mapping[str, Sequence[int]],
    engine: Engine,
    device: torch.device,
    timeout_s: float,
) -> dict[str, CudaIpcFabric]:
    """Make this rank's fabrics; all ranks of the world take part.

    Args:
        control: carries the names of shared segments.
        groups: global ranks by fabric name, more than one each; none where this rank has no such group.
        engine: moves the bytes.
        device: of the tensors.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        CannotShareError: memory could not be shared with some rank; raised on every rank.
    """
    boxes = Boxes(control, engine, timeout_s)
    names: dict[str, str] = {}
    sizes = {name: 8 * BLOCK_WORDS * len(ranks) for name, ranks in groups.items()}
    error: Exception | None = None
    try:
        try:
            for name, ranks in groups.items():
                names[name], buffer = shared_memory.create(sizes[name])
                boxes.offer(name, ranks, buffer)
        except ChannelError as failure:
            error = failure
        offers = _agree(control, names, error, timeout_s)
        try:
            for name, ranks in groups.items():
                for peer in ranks:
                    if peer != control.rank:
                        buffer = shared_memory.attach(offers[peer][name], sizes[name])
                        boxes.accept(name, ranks, peer, buffer)
        except ChannelError as failure:
            error = failure
        _agree(control, {}, error, timeout_s)
    except BaseException:
        boxes.close()
        raise
    finally:
        for name in names.values():
            shared_memory.unlink(name)
    return {
        name: CudaIpcFabric(name, ranks, device, control, boxes) for name, ranks in groups.items()
    }


def _agree(
    control: SocketControl, names: Mapping[str, str], error: Exception | None, timeout_s: float
) -> list[dict[str, str]]:
    """Tell names; when a rank failed, raise on every rank."""
    own = {"names": dict(names), "error": None if error is None else str(error)}
    replies = control.all_gather(own, deadline_s=timeout_s)
    for rank, reply in enumerate(replies):
        if reply["error"] is not None:
            raise CannotShareError(
                f"rank {rank} cannot share memory over CUDA IPC: {reply['error']}"
            )
    return [reply["names"] for reply in replies]

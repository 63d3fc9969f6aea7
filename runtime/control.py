"""The control plane between processes: agreement, heartbeats, and the failure word.

Every rank is connected to every other one by TCP, so nothing here depends on rank 0 or on a store.
One daemon thread per process reads all sockets. A socket that ends without a "bye" is a dead peer;
one that stays silent for ``timeout_s`` is a stopped peer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from spec_compile.errors import ChannelError

from .failure import FailureLatch, FailureWord
from .mesh import encode, take_frame, to_json

HEARTBEAT_S = 0.5
GOODBYE_S = 0.5
log = logging.getLogger(__name__)


class Peer:
    """One connection, and what is known about the rank at its other end."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.last_heard = time.monotonic()
        self.left = False
        """It said bye."""
        self.lost = False
        """Its connection ended."""
        self._received = bytearray()
        self._waiting = bytearray()
        self._lock = threading.RLock()

    @property
    def has_waiting(self) -> bool:
        """Bytes wait until the connection can take them."""
        return bool(self._waiting)

    def send(self, frame: bytes) -> None:
        """Queue ``frame`` and send what goes at once; never blocks or raises."""
        with self._lock:
            self._waiting += frame
            self.flush()

    def flush(self) -> None:
        """Send what the connection takes now."""
        with self._lock:
            try:
                while self._waiting:
                    del self._waiting[: self.connection.send(self._waiting)]
            except BlockingIOError:
                return
            except OSError:  # the reading side finds the end of the connection and reports it
                self._waiting.clear()

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that are complete now; sets `lost` at the end of the connection.

        Raises:
            ChannelError: what came is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.lost = not data
        self.last_heard = time.monotonic()
        self._received += data
        messages = []
        while (message := take_frame(self._received)) is not None:
            messages.append(message)
        return messages


class SocketControl:
    """A `Control` over one TCP connection to every other rank.

    `all_gather` is for one thread at a time; everything else is for any thread.

    Args:
        rank: this rank.
        size: ranks of the world.
        sockets: a connected, non-blocking socket for every other rank.
        timeout_s: silence after which a peer counts as stopped.
    """

    def __init__(
        self, rank: int, size: int, sockets: dict[int, socket.socket], *, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self.latch = FailureLatch()
        self._timeout_s = timeout_s
        self._interval_s = min(HEARTBEAT_S, timeout_s / 4)
        self._peers = {r: Peer(r, connection) for r, connection in sorted(sockets.items())}
        self._changed = threading.Condition()
        self._entries: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._sequence = 0
        self._closed = False
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.setblocking(False)
        self.latch.subscribe(self._notify)
        self._thread = threading.Thread(target=self._run, name="spec_compile control", daemon=True)
        self._thread.start()
        # unlike atexit, this also runs at the end of a child of multiprocessing
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        _open.add(self)

    def all_gather(self, payload: Any, *, deadline_s: float) -> list[Any]:
        """Give every rank the list of all ranks' JSON-able payloads, in rank order.

        Raises:
            ChannelError: a peer died, stopped, left, or did not come within ``deadline_s``; names
                it. A failure word of another class comes as that class.
        """
        self.check()
        if self._closed:
            raise ChannelError("the control plane was closed; build a new model to go on")
        number = self._sequence
        self._send_all({"kind": "entry", "number": number, "payload": payload})
        self._sequence += 1
        end = time.monotonic() + deadline_s
        with self._changed:
            while missing := [p for r, p in self._peers.items() if r not in self._entries[number]]:
                self.check()
                self._check_missing(missing, number, end, deadline_s)
                self._changed.wait(max(self._interval_s / 4, end - time.monotonic()))
            entries = self._entries.pop(number)
        entries[self.rank] = json.loads(to_json(payload))
        return [entries[r] for r in range(self.size)]

    def _check_missing(
        self, missing: list[Peer], number: int, end: float, deadline_s: float
    ) -> None:
        ranks = [peer.rank for peer in missing]
        gone = [peer.rank for peer in missing if peer.left]
        what = f"all_gather {number} of rank {self.rank}"
        if gone:
            raise ChannelError(f"{what}: ranks {gone} closed their model while this rank waited")
        if time.monotonic() >= end and not self.silent():
            raise ChannelError(
                f"{what}: waited {deadline_s:g} s for ranks {ranks}, which are alive but did not "
                "come; check that all ranks make the same calls in the same order"
            )

    def fail(self, error: BaseException) -> None:
        """Publish the failure word to all ranks, this one included; never blocks or raises."""
        self._publish(FailureWord.of(error, self.rank))

    def tell(self, rank: int, subject: str, payload: Any) -> None:
        """Let `listen`'s handler of ``subject`` run on another rank; never blocks or raises."""
        message = {"kind": "note", "subject": subject, "payload": payload}
        self._peers[rank].send(encode(message))
        self._ring()

    def listen(self, subject: str, handler: Callable[[Any], None]) -> None:
        """Call ``handler`` with every payload told to this rank, on the control thread: be short.

        What it raises becomes the failure of all ranks. Notes without a handler are dropped.
        """
        self._handlers[subject] = handler

    def check(self) -> None:
        """Raise the failure that was published or found, if any."""
        self.latch.check()

    def left(self) -> list[int]:
        """Ranks that closed their model."""
        return [peer.rank for peer in self._peers.values() if peer.left]

    def silent(self) -> list[int]:
        """Ranks that missed heartbeats: within ``timeout_s`` they are heard again, or stopped."""
        limit = time.monotonic() - 3 * self._interval_s
        peers = self._peers.values()
        return [p.rank for p in peers if p.last_heard < limit and not (p.left or p.lost)]

    def close(self) -> None:
        """Say bye and stop the thread; idempotent, and not a failure for the others."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        _open.discard(self)
        self._send_all({"kind": "bye"})
        end = time.monotonic() + GOODBYE_S
        while any(p.has_waiting for p in self._peers.values()) and time.monotonic() < end:
            time.sleep(0.005)
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(GOODBYE_S)
        self._abandon()

    def _abandon(self) -> None:
        self._closed = True
        for connection in (self._bell, self._rope, *(p.connection for p in self._peers.values())):
            connection.close()

    def _publish(self, word: FailureWord) -> None:
        # the word goes out before the local listeners tear connections down: peers learn why
        if not self.latch.is_set():
            self._send_all({"kind": "fail", "word": dataclasses.asdict(word)})
        self.latch.set(word)

    def _send_all(self, message: dict[str, Any]) -> None:
        frame = encode(message)
        for peer in self._peers.values():
            if not peer.lost:
                peer.send(frame)
        if any(peer.has_waiting for peer in self._peers.values()):
            self._ring()

    def _ring(self) -> None:
        try:
            self._rope.send(b"!")
        except OSError:  # full, so the thread will wake anyway; or closed
            return

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._bell, selectors.EVENT_READ)
                for peer in self._peers.values():
                    selector.register(peer.connection, selectors.EVENT_READ, peer)
                self._loop(selector)
        except Exception as error:
            if not self._closed:
                log.exception("the control thread of rank %d broke", self.rank)
                self.fail(ChannelError(f"the control thread of rank {self.rank} broke: {error!r}"))

    def _loop(self, selector: selectors.BaseSelector) -> None:
        tick, last_beat = time.monotonic(), -math.inf
        while not self._closed:
            if tick - last_beat >= self._interval_s:
                last_beat = tick
                self._beat()
            for peer in self._peers.values():
                self._watch(selector, peer)
            for key, mask in selector.select(self._interval_s):
                if key.data is None:
                    self._bell.recv(1 << 12)
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
                else:
                    key.data.flush()
            previous, tick = tick, time.monotonic()
            self._check_silence(tick, tick - previous)

    def _watch(self, selector: selectors.BaseSelector, peer: Peer) -> None:
        """Ask for what the peer needs: reads while it is there, writes while bytes wait."""
        if peer.lost:
            if peer.connection in selector.get_map():
                selector.unregister(peer.connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_waiting else 0)
        if selector.get_key(peer.connection).events != events:
            selector.modify(peer.connection, events, peer)

    def _beat(self) -> None:
        frame = encode({"kind": "beat"})
        for peer in self._peers.values():
            if not peer.lost and not peer.has_waiting:  # queued bytes are a sign of life themselves
                peer.send(frame)

    def _read(self, peer: Peer) -> None:
        try:
            for message in peer.read():
                self._handle(peer, message)
        except (ChannelError, KeyError, TypeError, ValueError) as error:
            peer.lost = True
            self.fail(ChannelError(f"rank {peer.rank} sent a malformed control message: {error}"))
            return
        if peer.lost and not peer.left and not self._closed:
            self._found(
                f"rank {peer.rank} died: its connection to rank {self.rank} ended without a "
                "goodbye; look at that rank's own output"
            )

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "entry":
            with self._changed:
                self._entries[int(message["number"])][peer.rank] = message["payload"]
                self._changed.notify_all()
        elif kind == "fail":
            self.latch.set(FailureWord.from_json(message["word"]))
        elif kind == "note":
            self._deliver(message)
        elif kind == "bye":
            peer.left = True
            self._notify()
        elif kind != "beat":
            raise ChannelError(f"unknown kind {kind!r}")

    def _deliver(self, message: dict[str, Any]) -> None:
        handler = self._handlers.get(str(message["subject"]))
        try:
            if handler is not None:
                handler(message["payload"])
        except Exception as error:
            self.fail(error)

    def _check_silence(self, now: float, pause_s: float) -> None:
        if pause_s > self._timeout_s:
            self._found(
                f"rank {self.rank} was stopped for {pause_s:.1f} s, longer than timeout_s = "
                f"{self._timeout_s:g}; its peers have given it up"
            )
        if pause_s > 4 * self._interval_s:
            return  # after a stop of our own, first read what came meanwhile
        for peer in self._peers.values():
            silence_s = now - peer.last_heard
            if silence_s > self._timeout_s and not peer.left and not peer.lost:
                peer.last_heard = now
                self._found(
                    f"rank {peer.rank} stopped: rank {self.rank} expected a heartbeat every "
                    f"{self._interval_s:g} s and has heard nothing for {silence_s:.1f} s "
                    f"(timeout_s = {self._timeout_s:g})"
                )

    def _found(self, message: str) -> None:
        """Publish a failure that this rank found about another, or about itself."""
        self._publish(FailureWord(ChannelError.__name__, message, self.rank))

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once when a failure is heard; see `FailureLatch.subscribe`."""
        self.latch.subscribe(listener)


_open: weakref.WeakSet[SocketControl] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Close inherited sockets: a child that outlives its rank must not keep it looking alive."""
    for control in list(_open):
        control._abandon()


os.register_at_fork(after_in_child=_forget_in_child)

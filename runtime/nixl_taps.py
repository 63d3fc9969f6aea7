"""Taps through NIXL: one-sided writes by UCX, over RDMA, NVLink, shared memory or TCP, between any hosts.

The stamp and the header are the notification of the write: NIXL delivers it after the payload. Credits
are notifications without a write. Both ends register their memory once a ring.

The agent's progress thread stays on: over TCP a write ends only when the peer's process moves it, and
the peer may be waiting for the activation that follows the taps. It costs a part of a core.
"""

from __future__ import annotations

import base64
import importlib
import logging
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from spec_compile.errors import ChannelError, ConfigError

from .tap_seal import is_whole, sealed_bytes, value_in, write_seal
from .tap_slot import HEADER_BYTES
from .tap_transport import RingLayout, Setting, TapEdge, Wait

PACKAGE = "nixl_cu13"
_WORD = struct.Struct("<qq")
"""Slot (-1: a credit) and stamp; a header follows a stamp, then the edge's name."""
CREDIT = -1
GRACE_S = 1.0
"""How long a broken connection waits for the control plane to say why."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class Peer(NamedTuple):
    """Whom a writer writes to."""

    agent: str
    device: int
    """Its number of the device that holds the slots."""


class NixlWriter:
    """The source's end: registered staging, written into the peer's slots."""

    def __init__(
        self,
        taps: NixlTaps,
        name: str,
        layout: RingLayout,
        peer: Peer,
        places: Sequence[Sequence[int]],
    ) -> None:
        self._taps, self._name, self._peer, self._places = taps, name, peer, places
        self._staging = [_slot(layout, taps.device) for _ in range(layout.depth)]
        self._registered = taps.register(self._staging)
        self.credit = 0

    def begin(self, credit: int, num_pushes: int) -> None:
        """Nothing to prepare."""

    def wait_credit(self, expected: int, wait: Wait) -> None:
        """Take notifications until the credit is there."""

        def credit() -> int:
            self._taps.poll(wait)
            return self.credit

        wait.until(credit, expected, "credit")

    def push(
        self, slot: int, stamp: int, header: bytes, values: Sequence[Tensor], wait: Wait
    ) -> None:
        """Write all values as one transfer whose notification is the stamp; returns when it is out."""
        sizes = []
        for place, value in zip(self._staging[slot], values, strict=True):
            value_in(place, value).copy_(value.detach())
            write_seal(place, value.nbytes, stamp)
            sizes.append(sealed_bytes(value.nbytes))
        _finish(self._taps.device)
        message = _WORD.pack(slot, stamp) + header + self._name.encode()
        if sum(sizes):
            local = [(x.data_ptr(), n) for x, n in zip(self._staging[slot], sizes, strict=True)]
            remote = list(zip(self._places[slot], sizes, strict=True))
            self._taps.write(self._peer, local, remote, message, wait)
        else:
            self._taps.tell(self._peer.agent, message, wait)

    def close(self) -> None:
        """Release the staging; idempotent."""
        self._taps.forget(self._name, self._registered)
        self._registered = None


class NixlReader:
    """The draft's end: registered slots."""

    def __init__(self, taps: NixlTaps, name: str, layout: RingLayout) -> None:
        self._taps, self._name, self._layout = taps, name, layout
        cuda = taps.device.type == "cuda"
        self._aside = torch.cuda.stream(torch.cuda.Stream(taps.device) if cuda else None)
        self.slots = [_slot(layout, taps.device) for _ in range(layout.depth)]
        self._registered = taps.register(self.slots)
        self.stamps = [0] * layout.depth
        self.headers = [b""] * layout.depth
        self.peer = ""

    def begin(self, credit: int, num_pushes: int) -> None:
        """Nothing to prepare."""

    def wait_stamp(self, slot: int, expected: int, wait: Wait) -> int:
        """Take notifications until the stamp is there."""

        def stamp() -> int:
            self._taps.poll(wait)
            return self.stamps[slot]

        return wait.until(stamp, expected, "stamp")

    def stamp(self, slot: int) -> int:
        """The stamp that came last, once the notifications of now are taken."""
        self._taps.poll(self._name)
        return self.stamps[slot]

    def header(self, slot: int) -> bytes:
        """The header that came with it."""
        return self.headers[slot]

    def values(self, slot: int, rows: int, like: Sequence[Tensor]) -> list[Tensor]:
        """The slot's values in place."""
        pairs = zip(self.slots[slot], like, strict=True)
        return [value_in(memory, x) for memory, x in pairs]

    def cut(self, slot: int, stamp: int, rows: int) -> list[int]:
        """Values without the seal of this push."""
        pairs = enumerate(zip(self.slots[slot], self._layout.spec.sizes(rows), strict=True))
        with self._aside:  # what the draft's stream still has to do is none of its business
            return [i for i, (memory, size) in pairs if not is_whole(memory, size, stamp)]

    def give_credit(self, credit: int) -> None:
        """Notify the writer."""
        _finish(self._taps.device)
        message = _WORD.pack(CREDIT, credit) + self._name.encode()
        self._taps.tell(self.peer, message, self._name)

    def poison(self, slot: int) -> None:
        """Overwrite the payload with NaNs."""
        for memory in self.slots[slot]:
            memory.fill_(255)

    def close(self) -> None:
        """Release the slots; idempotent."""
        self._taps.forget(self._name, self._registered)
        self._registered = None


class NixlTaps:
    """A `TapTransport` between any processes that UCX connects; one agent a rank."""

    def __init__(self, setting: Setting) -> None:
        self.device = setting.device
        self._control = setting.control
        self._memory = "VRAM" if self.device.type == "cuda" else "DRAM"
        self._number = self.device.index or 0
        self._api = load()
        config = self._api.nixl_agent_config(backends=["UCX"])
        name = f"spec_compile {setting.control.rank} {secrets.token_hex(8)}"
        self._agent: Any = self._try("start", lambda: self._api.nixl_agent(name, config))
        self._writers: dict[str, NixlWriter] = {}
        self._readers: dict[str, NixlReader] = {}
        self._peers: set[str] = set()

    def offer(self, edge: TapEdge, layout: RingLayout) -> tuple[NixlReader, Any]:
        """Register the slots; the handle holds their addresses and this agent's metadata."""
        reader = NixlReader(self, edge.name, layout)
        self._readers[edge.name] = reader
        places = [[memory.data_ptr() for memory in slot] for slot in reader.slots]
        return reader, {"agent": self._metadata(), "places": places, "device": self._number}

    def accept(self, edge: TapEdge, layout: RingLayout, handle: Any) -> tuple[NixlWriter, Any]:
        """Register staging and meet the reader's agent."""
        peer = Peer(self._meet(handle["agent"]), int(handle["device"]))
        writer = NixlWriter(self, edge.name, layout, peer, handle["places"])
        self._writers[edge.name] = writer
        return writer, self._metadata()

    def settle(self, edge: TapEdge, answer: Any) -> None:
        """Meet the writer's agent."""
        self._readers[edge.name].peer = self._meet(answer)

    def withdraw(self) -> None:
        """There are no names."""

    def close(self) -> None:
        """Leave all agents and end this one; idempotent."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for peer in self._peers:
            self._try("leave a peer", partial(agent.remove_remote_agent, peer), loud=False)
        self._peers.clear()

    def register(self, slots: Sequence[Sequence[Tensor]]) -> Any:
        """Register memory; what is returned goes to `forget`."""
        regions = [(x.data_ptr(), max(1, x.nbytes), self._number, "") for s in slots for x in s]
        return self._try(
            "register memory", lambda: self._agent.register_memory(regions, self._memory)
        )

    def forget(self, name: str, registered: Any) -> None:
        """Take an end out, and its memory."""
        self._writers.pop(name, None)
        self._readers.pop(name, None)
        if registered is not None and self._agent is not None:
            self._try(
                "release memory", lambda: self._agent.deregister_memory(registered), loud=False
            )

    def write(
        self,
        peer: Peer,
        local: list[tuple[int, int]],
        remote: list[tuple[int, int]],
        message: bytes,
        wait: Wait,
    ) -> None:
        """Write regions of (address, bytes) into the peer's, then notify; waits for the end."""
        agent = self._agent
        mine = agent.get_xfer_descs([(at, n, self._number) for at, n in local if n], self._memory)
        theirs = agent.get_xfer_descs([(at, n, peer.device) for at, n in remote if n], self._memory)
        handle = self._try(
            wait, lambda: agent.initialize_xfer("WRITE", mine, theirs, peer.agent, message)
        )

        def done(state: str) -> int:
            if state == "ERR":
                raise ChannelError(f"{wait}: NIXL could not write to {peer.agent!r}")
            return int(state == "DONE")

        state = self._try(wait, lambda: agent.transfer(handle))
        if not done(state):
            wait.until(
                lambda: done(self._try(wait, lambda: agent.check_xfer_state(handle))),
                1,
                "end of a write",
            )
        self._try(wait, lambda: agent.release_xfer_handle(handle))

    def tell(self, peer: str, message: bytes, where: object) -> None:
        """Notify a peer."""
        self._try(where, lambda: self._agent.send_notif(peer, message))

    def poll(self, where: object) -> None:
        """Take what peers have told since."""
        news = self._try(where, lambda: self._agent.get_new_notifs())
        for messages in news.values():
            for message in messages:
                self._take(bytes(message))

    def _take(self, message: bytes) -> None:
        slot, stamp = _WORD.unpack_from(message)
        if slot == CREDIT:
            writer = self._writers.get(message[_WORD.size :].decode())
            if writer is not None:  # else of a ring that was replaced
                writer.credit = max(writer.credit, stamp)
            return
        at = _WORD.size + HEADER_BYTES
        reader = self._readers.get(message[at:].decode())
        if reader is not None:
            reader.headers[slot] = message[_WORD.size : at]
            reader.stamps[slot] = stamp

    def _metadata(self) -> str:
        text = self._try("describe itself", lambda: self._agent.get_agent_metadata())
        return base64.b64encode(text).decode("ascii")

    def _meet(self, metadata: str) -> str:
        text = base64.b64decode(metadata)
        peer = self._try("meet a peer", lambda: self._agent.add_remote_agent(text))
        name = peer.decode() if isinstance(peer, bytes) else str(peer)
        self._peers.add(name)
        return name

    def _try(self, what: object, call: Callable[[], T], *, loud: bool = True) -> Any:
        """Call NIXL; its errors surface as ChannelError, or in the log when ``loud`` is False."""
        try:
            return call()
        except ChannelError:
            raise
        except Exception as error:
            if not loud:
                log.info("NIXL could not %s: %s", what, error)
                return None
            raise self._reason(f"{what}: NIXL failed: {type(error).__name__}: {error}") from error

    def _reason(self, text: str) -> Exception:
        """Make the error of a broken connection: the control plane's, where it soon knows why."""
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            try:
                self._control.check()
            except Exception as reason:
                return reason
            time.sleep(0.02)
        return ChannelError(text)


def load() -> Any:
    """Import NIXL.

    Raises:
        ConfigError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(f"{PACKAGE}._api")
    except ImportError as error:
        raise ConfigError(
            f"tap_transport='nixl' needs the package nixl-cu13, found {error}; install "
            "spec-compile[nixl], or use 'auto'"
        ) from error


def _slot(layout: RingLayout, device: torch.device) -> list[Tensor]:
    sizes = layout.spec.sizes(layout.capacity_rows)
    return [torch.zeros(sealed_bytes(n), dtype=torch.uint8, device=device) for n in sizes]


def _finish(device: torch.device) -> None:
    """NIXL knows no streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

"""Own TCP connections between all ranks, and the frames that travel on them."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from spec_compile.errors import ChannelError

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 26
MAX_HELLO_BYTES = 1 << 12
HELLO_TIMEOUT_S = 5.0
Address = tuple[str, int]
log = logging.getLogger(__name__)


def to_json(payload: Any) -> str:
    """Write what travels on the control plane.

    Raises:
        ChannelError: it holds something that JSON cannot.
    """
    try:
        return json.dumps(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChannelError(f"a control message must be JSON-able: {error}") from error


def encode(message: dict[str, Any]) -> bytes:
    """Write a message as one frame: its length (4 bytes, big endian), then JSON.

    Raises:
        ChannelError: the message is too large or holds something that JSON cannot.
    """
    body = to_json(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelError(
            f"a control message may have {MAX_FRAME_BYTES} bytes, found {len(body)}; send tensors "
            "through a fabric"
        )
    return HEADER.pack(len(body)) + body


def take_frame(received: bytearray, limit: int = MAX_FRAME_BYTES) -> dict[str, Any] | None:
    """Cut the first whole frame off ``received``; None when more bytes are needed.

    Raises:
        ChannelError: the bytes are no frame.
    """
    if len(received) < HEADER.size:
        return None
    (length,) = HEADER.unpack_from(received)
    if length > limit:
        raise ChannelError(f"expected a frame of at most {limit} bytes, found {length}")
    if len(received) < HEADER.size + length:
        return None
    body = bytes(received[HEADER.size : HEADER.size + length])
    del received[: HEADER.size + length]
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"expected JSON in a frame, found {body[:40]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ChannelError(f"expected an object with a kind in a frame, found {body[:40]!r}")
    return message


def listen(host: str, backlog: int) -> socket.socket:
    """Open a listener on a free port of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(backlog + 16)
    return listener


def connect_mesh(
    rank: int,
    addresses: Sequence[Address],
    listener: socket.socket,
    token: str,
    deadline_s: float,
) -> dict[int, socket.socket]:
    """Connect to all lower ranks, accept all higher ones; return the sockets by rank.

    A connection that does not show ``token`` is dropped.

    Args:
        rank: this rank.
        addresses: where each rank listens already.
        listener: this rank's own listener; closed on return.
        token: a secret that all ranks share.
        deadline_s: seconds for everything.

    Raises:
        ChannelError: a rank could not be reached or did not come in time; names it.
    """
    end = time.monotonic() + deadline_s
    sockets: dict[int, socket.socket] = {}
    try:
        with listener:
            for peer in range(rank):
                sockets[peer] = _connect(rank, peer, addresses[peer], token, end)
            while missing := [r for r in range(rank + 1, len(addresses)) if r not in sockets]:
                accepted = _accept(listener, token, missing, end)
                if accepted is not None:
                    sockets[accepted[0]] = accepted[1]
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    for connection in sockets.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _connect(rank: int, peer: int, address: Address, token: str, end: float) -> socket.socket:
    try:
        connection = socket.create_connection(address, max(0.1, end - time.monotonic()))
        connection.sendall(encode({"kind": "hello", "rank": rank, "token": token}))
    except OSError as error:
        raise ChannelError(
            f"rank {rank} cannot reach rank {peer} at {address[0]}:{address[1]}: {error}; the "
            "ranks of a plan must be able to open TCP connections to each other"
        ) from error
    return connection


def _accept(
    listener: socket.socket, token: str, missing: list[int], end: float
) -> tuple[int, socket.socket] | None:
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise ChannelError(f"ranks {missing} did not connect to the control plane in time")
    listener.settimeout(left_s)
    try:
        connection, address = listener.accept()
    except TimeoutError:
        return None
    try:
        hello = _read_hello(connection, min(end, time.monotonic() + HELLO_TIMEOUT_S))
        if not hmac.compare_digest(str(hello.get("token")).encode(), token.encode()):
            raise ChannelError("wrong token")
        if hello.get("rank") not in missing:
            raise ChannelError(f"rank {hello.get('rank')!r} is not expected")
    except (OSError, ChannelError) as error:
        log.warning("dropped a connection from %s that is no rank of this run: %s", address, error)
        connection.close()
        return None
    return int(hello["rank"]), connection


def _read_hello(connection: socket.socket, end: float) -> dict[str, Any]:
    header = _read_exactly(connection, HEADER.size, end)
    (length,) = HEADER.unpack(header)
    body = _read_exactly(connection, min(length, MAX_HELLO_BYTES), end)
    hello = take_frame(bytearray(header + body), MAX_HELLO_BYTES)
    assert hello is not None, "header and body make a whole frame"
    return hello


def _read_exactly(connection: socket.socket, count: int, end: float) -> bytes:
    """Read no byte more: what follows belongs to the control thread."""
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.001, end - time.monotonic()))
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ChannelError("it closed without a hello")
        received += chunk
    return received

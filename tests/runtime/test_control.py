"""The control plane: agreement, the failure word, and what it does with broken peers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spec_compile.errors import BatchError, ChannelError, InvariantError, SpecCompileError
from spec_compile.plan import Plan
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.fabric import Control
from spec_compile.runtime.failure import FailureLatch, FailureWord
from spec_compile.runtime.mesh import (
    HEADER,
    connect_mesh,
    encode,
    listen,
    take_frame,
)
from spec_compile.runtime.solo import SoloControl
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads

TIMEOUT_S = 2.0


def mesh(size: int) -> list[dict[int, socket.socket]]:
    """Sockets of a full mesh inside this process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends[low][high], ends[high][low] = socket.socketpair()
            for end in (ends[low][high], ends[high][low]):
                end.setblocking(False)
    return ends


def socket_controls(size: int) -> list[SocketControl]:
    sockets = mesh(size)
    return [SocketControl(r, size, sockets[r], timeout_s=TIMEOUT_S) for r in range(size)]


def thread_controls(size: int) -> list[Control]:
    return [world.control for world in thread_worlds(Plan(dp=size, timeout_s=TIMEOUT_S))]


@pytest.fixture(params=[socket_controls, thread_controls], ids=["sockets", "threads"])
def build(request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[Control]]]:
    built: list[Control] = []

    def make(size: int) -> list[Control]:
        built.extend(request.param(size))
        return built

    yield make
    for control in built:
        control.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_all_entries_in_rank_order(
    build: Callable[[int], list[Control]], size: int
) -> None:
    controls = build(size)

    def body(rank: int) -> list[list[object]]:
        gather = controls[rank].all_gather
        return [gather({"rank": rank, "call": i}, deadline_s=5) for i in range(20)]

    want = [[{"rank": r, "call": i} for r in range(size)] for i in range(20)]
    assert run_threads(size, body) == [want] * size


def test_an_entry_keeps_every_bit_of_a_float(build: Callable[[int], list[Control]]) -> None:
    controls = build(2)
    values = [0.1 + 0.2, 1e-320]
    got = run_threads(2, lambda r: controls[r].all_gather(values[r], deadline_s=5))
    assert got == [values, values]


def test_a_large_entry_arrives_whole(build: Callable[[int], list[Control]]) -> None:
    controls = build(3)
    text = "x" * 3_000_001
    got = run_threads(3, lambda r: controls[r].all_gather(text + str(r), deadline_s=20))
    assert got == [[text + str(r) for r in range(3)]] * 3


def test_a_late_but_living_peer_is_waited_for(build: Callable[[int], list[Control]]) -> None:
    controls = build(2)

    def body(rank: int) -> list[int]:
        if rank == 1:
            time.sleep(TIMEOUT_S * 1.5)
        return controls[rank].all_gather(rank, deadline_s=20)

    assert run_threads(2, body) == [[0, 1], [0, 1]]


def test_a_peer_that_never_comes_is_named_after_the_deadline(
    build: Callable[[int], list[Control]],
) -> None:
    controls = build(3)

    def body(rank: int) -> None:
        if rank != 2:
            with pytest.raises(ChannelError, match=r"\[2\]"):
                controls[rank].all_gather(None, deadline_s=0.3)

    run_threads(3, body)


def test_a_failure_word_keeps_class_message_and_traceback(
    build: Callable[[int], list[Control]],
) -> None:
    controls = build(3)

    def body(rank: int) -> None:
        if rank == 1:
            try:
                raise BatchError("three documents are missing")
            except BatchError as error:
                controls[rank].fail(error)
        with pytest.raises(BatchError) as caught:
            controls[rank].all_gather(None, deadline_s=10)
        assert str(caught.value) == "three documents are missing"
        (note,) = caught.value.__notes__
        assert "raised on rank 1" in note
        assert 'raise BatchError("three documents are missing")' in note

    began = time.monotonic()
    run_threads(3, body)
    assert time.monotonic() - began < 1.5


def test_the_first_failure_is_kept(build: Callable[[int], list[Control]]) -> None:
    control = build(2)[0]
    control.fail(ValueError("first"))
    control.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        control.check()


def test_a_peer_that_closed_is_named_by_who_waits_for_it(
    build: Callable[[int], list[Control]],
) -> None:
    controls = build(3)
    controls[1].close()
    time.sleep(0.2)
    controls[0].check()
    with pytest.raises(ChannelError, match=r"\[1\] closed"):
        controls[0].all_gather(None, deadline_s=10)


def test_a_malformed_payload_fails_alone_and_the_next_gather_works(
    build: Callable[[int], list[Control]],
) -> None:
    controls = build(2)

    def body(rank: int) -> list[int]:
        if rank == 0:
            with pytest.raises(ChannelError, match="JSON"):
                controls[rank].all_gather({"tensor": object()}, deadline_s=5)
        return controls[rank].all_gather(rank, deadline_s=5)

    assert run_threads(2, body) == [[0, 1], [0, 1]]


def test_a_peer_without_a_goodbye_is_dead_at_once() -> None:
    first, second = mesh(2)
    control = SocketControl(0, 2, first, timeout_s=60)
    began = time.monotonic()
    threading.Timer(0.1, second[0].close).start()
    with pytest.raises(ChannelError, match="rank 1 died"):
        control.all_gather(None, deadline_s=20)
    assert time.monotonic() - began < 1.0
    control.close()


def test_a_silent_peer_is_stopped_after_the_timeout() -> None:
    first, _second = mesh(2)
    control = SocketControl(0, 2, first, timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(ChannelError, match="rank 1 stopped"):
        control.all_gather(None, deadline_s=20)
    assert 0.9 < time.monotonic() - began < 3.0
    control.close()


def test_a_peer_that_sees_no_failure_hears_of_it_from_the_others() -> None:
    sockets = mesh(3)
    first = SocketControl(0, 3, sockets[0], timeout_s=60)
    third = SocketControl(2, 3, sockets[2], timeout_s=60)
    sockets[1][0].close()  # rank 1 keeps its connection to rank 2
    with pytest.raises(ChannelError, match="rank 1 died"):
        third.all_gather(None, deadline_s=5)
    first.close()
    third.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff too long",
        HEADER.pack(3) + b"{{{",
        HEADER.pack(2) + b"[]",
        encode({"kind": "riddle"}),
        encode({"kind": "entry"}),
        encode({"kind": "fail", "word": {"rank": 1}}),
    ],
    ids=["length", "no json", "no object", "kind", "entry", "fail"],
)
def test_garbage_from_a_peer_is_a_channel_error_that_names_it(garbage: bytes) -> None:
    first, second = mesh(2)
    control = SocketControl(0, 2, first, timeout_s=30)
    second[0].send(garbage)
    with pytest.raises(ChannelError, match="rank 1 sent a malformed"):
        control.all_gather(None, deadline_s=10)
    control.close()


def test_a_frame_cut_anywhere_is_read_whole() -> None:
    frames = encode({"kind": "beat"}) + encode({"kind": "entry", "payload": "\u00e9\u4e2d"})
    for size in range(1, 9):
        received, messages = bytearray(), []
        for start in range(0, len(frames), size):
            received += frames[start : start + size]
            while (message := take_frame(received)) is not None:
                messages.append(message)
        assert messages == [{"kind": "beat"}, {"kind": "entry", "payload": "\u00e9\u4e2d"}]


def test_the_mesh_drops_strangers(caplog: pytest.LogCaptureFixture) -> None:
    listeners = [listen("127.0.0.1", 3) for _ in range(3)]
    addresses = [listener.getsockname() for listener in listeners]
    strangers = [socket.create_connection(addresses[0]) for _ in range(3)]
    strangers[0].sendall(encode({"kind": "hello", "rank": 1, "token": "guess"}))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 300)
    strangers[2].close()
    meshes = run_threads(3, lambda r: connect_mesh(r, addresses, listeners[r], "secret", 20))
    assert [sorted(m) for m in meshes] == [[1, 2], [0, 2], [0, 1]]
    assert len(caplog.records) == 3
    for connection in (*strangers[:2], *(end for m in meshes for end in m.values())):
        connection.close()


def test_a_rank_that_never_connects_is_named() -> None:
    with pytest.raises(ChannelError, match=r"\[1\] did not connect"):
        connect_mesh(0, [("127.0.0.1", 1)] * 2, listen("127.0.0.1", 2), "secret", 0.2)


class Foreign(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvariantError("a"), InvariantError, "a"),
        (ZeroDivisionError("b"), ZeroDivisionError, "b"),
        (KeyError("c"), KeyError, "'c'"),
        (Foreign("d"), SpecCompileError, "Foreign: d"),
        (KeyboardInterrupt(), ChannelError, "KeyboardInterrupt: "),
        (UnicodeDecodeError("utf-8", b"e", 0, 1, "f"), SpecCompileError, "UnicodeDecodeError: "),
    ],
    ids=["own", "builtin", "key", "foreign", "interrupt", "many arguments"],
)
def test_a_word_rebuilds_the_nearest_class_without_pickle(
    error: BaseException, kind: type[Exception], message: str
) -> None:
    rebuilt = FailureWord.of(error, 3).exception()
    assert type(rebuilt) is kind
    assert str(rebuilt).startswith(message)


def test_a_latch_calls_late_listeners_too() -> None:
    latch, calls = FailureLatch(), []
    latch.subscribe(lambda: calls.append("early"))
    latch.set(FailureWord.of(ValueError("x"), 0))
    latch.set(FailureWord.of(ValueError("y"), 0))
    latch.subscribe(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_close_is_idempotent_and_later_gathers_say_so() -> None:
    for control in (socket_controls(2)[0], SoloControl()):
        control.close()
        control.close()
        with pytest.raises(ChannelError, match="closed"):
            control.all_gather(None, deadline_s=1)

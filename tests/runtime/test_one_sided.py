"""The protocol of one-sided messages, in processes, over a device made of host memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from spec_compile.errors import ChannelError
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.cuda_ipc import CudaIpcFabric, connect
from spec_compile.runtime.one_sided import FIRST_BYTES, SLOTS
from spec_compile.runtime.processes import join
from tests.ranks import process_outcomes, run_processes

from .plain_engine import PlainEngine

pytestmark = pytest.mark.dist
T = TypeVar("T")
CPU = torch.device("cpu")


def in_group(
    size: int,
    body: Callable[[CudaIpcFabric, PlainEngine], T],
    *,
    timeout_s: float = 20.0,
    engine: Callable[[], PlainEngine] = PlainEngine,
) -> list[T]:
    """Run ``body`` in ``size`` processes joined by one fabric; no shared memory may be left."""
    values = run_processes(size, partial(_ranked, body, size, timeout_s, engine))
    assert not [p for pid, _ in values for p in Path("/dev/shm").glob(f"spec_compile_{pid}_*")]
    return [value for _, value in values]


def _ranked(
    body: Callable[[CudaIpcFabric, PlainEngine], T],
    size: int,
    timeout_s: float,
    engine: Callable[[], PlainEngine],
    rank: int,
) -> tuple[int, T]:
    device = engine()
    control, fabric = open_fabric(size, device, timeout_s)
    value = body(fabric, device)
    fabric.close()
    control.close()
    return os.getpid(), value


def open_fabric(
    size: int, engine: PlainEngine, timeout_s: float
) -> tuple[SocketControl, CudaIpcFabric]:
    control = join(size, timeout_s=timeout_s)
    assert isinstance(control, SocketControl)
    made = connect(control, {"cp": list(range(size))}, engine, CPU, timeout_s)
    return control, made["cp"]


def test_collectives_equal_their_definitions() -> None:
    def body(fabric: CudaIpcFabric, engine: PlainEngine) -> None:
        rank, size = fabric.rank, fabric.size
        base = torch.arange(35, dtype=torch.float64).view(5, 7)
        everyone = torch.stack([base + r for r in range(size)])
        assert torch.equal(fabric.all_gather(base + rank), everyone)
        assert torch.equal(fabric.reduce_scatter(everyone * (rank + 1)), 6 * everyone[rank])
        (back,) = fabric.shift([base + rank])
        assert torch.equal(back, base + (rank - 1) % size)
        total = torch.full((300_000,), float(rank))
        fabric.all_reduce_(total)
        assert bool((total == 3).all())
        sends = [torch.full((rank + 1, r), float(10 * rank + r)) for r in range(size)]
        found = fabric.exchange(sends, [(r + 1, rank) for r in range(size)], torch.float32)
        for r, x in enumerate(found):
            assert torch.equal(x, torch.full((r + 1, rank), float(10 * r + rank)))

    in_group(3, body)


def test_messages_are_told_apart_by_tag_in_any_order() -> None:
    def body(fabric: CudaIpcFabric, engine: PlainEngine) -> None:
        peer = 1 - fabric.rank
        for tag in range(6):
            fabric.send(torch.full((3, tag + 1), float(tag + 10 * fabric.rank)), peer, tag)
        for tag in (5, 0, 3, 1, 4, 2):
            value = fabric.recv((3, tag + 1), torch.float32, peer, tag)
            assert torch.equal(value, torch.full((3, tag + 1), float(tag + 10 * peer)))
        fabric.flush()

    in_group(2, body)


def test_a59_a_late_device_reads_what_was_sent_and_not_what_came_after() -> None:
    """The sender drops its tensors at once and sends on; room is used again before it is free."""

    def body(fabric: CudaIpcFabric, engine: PlainEngine) -> None:
        peer, rows = 1 - fabric.rank, FIRST_BYTES // 8 // 1024
        for turn in range(12):
            fabric.send(torch.full((rows, 1024), float(turn)), peer, turn % 2)
            value = fabric.recv((rows, 1024), torch.float32, peer, turn % 2)
            assert bool((value == turn).all())
        fabric.flush()
        assert engine.allocated == [FIRST_BYTES]

    in_group(2, body, engine=partial(PlainEngine, delay_s=0.01))


def test_more_messages_than_slots_pass() -> None:
    def body(fabric: CudaIpcFabric, engine: PlainEngine) -> None:
        if fabric.rank == 0:
            for number in range(2 * SLOTS + 5):
                fabric.send(torch.tensor([number]), 1)
        else:
            for number in range(2 * SLOTS + 5):
                assert fabric.recv((1,), torch.int64, 0).item() == number
        fabric.flush()

    in_group(2, body)


def test_an_arena_grows_to_what_is_under_way_and_then_stays() -> None:
    def body(fabric: CudaIpcFabric, engine: PlainEngine) -> list[int]:
        peer, words = 1 - fabric.rank, FIRST_BYTES
        for turn in range(6):
            for tag in range(3):
                fabric.send(torch.full((words,), turn + tag, dtype=torch.int32), peer, tag)
            for tag in (2, 0, 1):
                value = fabric.recv((words,), torch.int32, peer, tag)
                assert bool((value == turn + tag).all())
        fabric.flush()
        assert engine.freed >= len(engine.allocated) - 2
        return engine.allocated

    for sizes in in_group(2, body):
        assert 3 <= sizes[-1] / (4 * FIRST_BYTES) <= 16  # a peer may be one turn late
        assert len(sizes) <= 6


def test_a_receiver_without_room_ends_the_sender_with_the_size() -> None:
    def body(rank: int) -> None:
        _, fabric = open_fabric(2, PlainEngine(room_bytes=FIRST_BYTES), 5.0)
        fabric.send(torch.zeros(FIRST_BYTES), 1 - rank)
        fabric.recv((FIRST_BYTES,), torch.float32, 1 - rank)

    for outcome in process_outcomes(2, body):
        assert isinstance(outcome.error, Exception), outcome
        assert f"{8 * FIRST_BYTES} bytes" in str(outcome.error)


def test_another_size_than_expected_is_refused() -> None:
    def body(rank: int) -> None:
        _, fabric = open_fabric(2, PlainEngine(), 5.0)
        fabric.send(torch.zeros(4), 1 - rank)
        fabric.recv((5,), torch.float32, 1 - rank)

    for outcome in process_outcomes(2, body):
        assert isinstance(outcome.error, ChannelError)
        assert "20 bytes), found 16 bytes" in str(outcome.error)


def test_a_tensor_that_never_comes_ends_in_an_error_that_names_it() -> None:
    def body(rank: int) -> None:
        _, fabric = open_fabric(2, PlainEngine(), 1.0)
        if rank == 0:
            fabric.recv((5,), torch.float32, 1, tag=7)
        else:
            time.sleep(3.0)
            fabric.check()

    first, second = process_outcomes(2, body)
    assert isinstance(first.error, ChannelError)
    assert "rank 1 -> rank 0: a tensor with tag 7 did not come within 1 s" in str(first.error)
    assert second.error is None  # a deadline that one rank meets is told by whoever calls it


def test_a_killed_peer_releases_a_device_that_waits_for_its_copy() -> None:
    """The copy was announced and never made: the device's wait ends, and the next call raises."""

    def body(rank: int) -> None:
        slow: dict[str, Any] = {"delay_s": 60.0} if rank == 1 else {}
        _, fabric = open_fabric(2, PlainEngine(**slow), 5.0)
        if rank == 1:
            fabric.send(torch.ones(4), 0)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.recv((4,), torch.float32, 1)
        fabric.flush()

    first, _ = process_outcomes(2, body)
    assert isinstance(first.error, ChannelError)
    assert "rank 1 died" in str(first.error)


def test_a_living_peer_whose_device_is_stuck_ends_all_ranks_by_deadline() -> None:
    def body(rank: int) -> None:
        slow: dict[str, Any] = {"delay_s": 60.0} if rank == 1 else {}
        control, fabric = open_fabric(2, PlainEngine(**slow), 1.0)
        if rank == 1:
            fabric.send(torch.ones(4), 0)
            control.all_gather(None, deadline_s=10.0)
        fabric.recv((4,), torch.float32, 1)
        fabric.flush()

    for outcome in process_outcomes(2, body):
        assert isinstance(outcome.error, ChannelError)
        assert "rank 1 -> rank 0, message 1: the device waits" in str(outcome.error)

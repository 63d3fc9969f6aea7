"""Tap channels: values, order, credits, faults, memory; threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spec_compile.errors import BatchError, ChannelError, ConfigError, InvariantError
from spec_compile.plan import Plan
from spec_compile.runtime.schedule import build_schedule, tap_depths
from spec_compile.runtime.tap_measure import measure
from spec_compile.runtime.taps import TapChannels, TapSpec
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import process_outcomes, run_processes, run_threads

SPEC = TapSpec(0, (5, 3), (torch.float32, torch.bfloat16), "plan-a")


def values_of(step: int, micro_batch: int, rows: int, spec: TapSpec = SPEC) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_batch + 77 * spec.source)
    return [
        torch.randn(rows, width, generator=generator).to(dtype)
        for width, dtype in zip(spec.widths, spec.dtypes, strict=True)
    ]


def like(rows: int, spec: TapSpec = SPEC) -> list[Tensor]:
    pairs = zip(spec.widths, spec.dtypes, strict=True)
    return [torch.empty(rows, width, dtype=dtype, device="meta") for width, dtype in pairs]


def assert_bitwise(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


class PipeControl:
    """A control plane between two forked processes; sees no failures but missed deadlines."""

    def __init__(self, pipes: tuple[Any, Any], rank: int) -> None:
        self.rank, self.size = rank, 2
        self.pipe = pipes[rank]

    def all_gather(self, payload: Any, *, deadline_s: float) -> list[Any]:
        self.pipe.send(payload)
        if not self.pipe.poll(deadline_s):
            raise ChannelError("the peer did not come")
        other = self.pipe.recv()
        return [payload, other] if self.rank == 0 else [other, payload]

    def fail(self, error: BaseException) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


def ring_of(channels: TapChannels) -> Any:
    """This rank's end of the ring of stage 0."""
    return next(iter((*channels.rings.writers.values(), *channels.rings.readers.values())))


def pair(
    producer: Callable[[TapChannels], Any],
    consumer: Callable[[TapChannels], Any],
    *,
    specs: tuple[TapSpec, TapSpec] = (SPEC, SPEC),
    depth: int = 2,
    capacity_rows: int = 8,
    timeout_s: float = 10.0,
    **options: Any,
) -> list[Any]:
    """Run both ends of one channel on two threads."""
    worlds = thread_worlds(Plan(pp=2, timeout_s=30.0))

    def body(rank: int) -> Any:
        channels = TapChannels.connect(
            worlds[rank].control,
            [specs[rank]],
            lane="dp0 cp0",
            stages=(rank,),
            num_stages=2,
            depths={0: depth},
            capacity_rows=capacity_rows,
            timeout_s=timeout_s,
            **options,
        )
        return (producer, consumer)[rank](channels)

    return run_threads(2, body)


def begin(channels: TapChannels, rows: Sequence[int] = (4, 2, 7)) -> TapChannels:
    channels.begin_step(0, rows)
    return channels


def push_all(channels: TapChannels) -> None:
    for micro_batch, rows in enumerate((4, 2, 7)):
        channels.push(0, micro_batch, values_of(0, micro_batch, rows))


@pytest.mark.parametrize("transport", ["loopback", "shm", "auto"])
@pytest.mark.parametrize("debug", [False, True])
def test_a48_uneven_micro_batches_arrive_bitwise(transport: str, debug: bool) -> None:
    def consumer(channels: TapChannels) -> str:
        begin(channels)
        for micro_batch, rows in enumerate((4, 2, 7)):
            assert_bitwise(
                channels.pull(0, micro_batch, like(rows)), values_of(0, micro_batch, rows)
            )
            channels.release(micro_batch)
        return channels.agreed.transports["dp0 cp0 0->1"]

    used = pair(lambda c: push_all(begin(c)), consumer, transport=transport, debug=debug)[1]
    assert used == ("loopback" if transport == "auto" else transport)


def test_two_sources_and_several_lanes_do_not_mix() -> None:
    specs = [TapSpec(s, (4,), (torch.float64,), "plan") for s in (0, 1)]
    plan = Plan(pp=3, cp=2, timeout_s=20.0)
    worlds = thread_worlds(plan)
    rows = [3, 5]

    def body(rank: int) -> None:
        at = worlds[rank].coordinates
        channels = TapChannels.connect(
            worlds[rank].control,
            specs,
            lane=f"cp{at.cp}",
            stages=(at.pp,),
            num_stages=3,
            depths={0: 3, 1: 2},
            capacity_rows=5,
        )
        for step in range(3):
            channels.begin_step(step, rows)
            for m, n in enumerate(rows):
                for spec in specs:
                    expected = [x + 100 * at.cp for x in values_of(step, m, n, spec)]
                    if at.pp == spec.source:
                        channels.push(spec.source, m, expected)
                    elif at.pp == 2:
                        assert_bitwise(channels.pull(spec.source, m, like(n, spec)), expected)
                channels.release(m)

    run_threads(plan.world_size, body)


def test_values_of_a_strided_or_differentiable_tensor_are_sent() -> None:
    x = torch.arange(20.0).view(5, 4).requires_grad_()
    spec = TapSpec(0, (5,), (torch.float32,), "plan")

    def consumer(channels: TapChannels) -> None:
        begin(channels, [4])
        (found,) = channels.pull(0, 0, like(4, spec))
        assert torch.equal(found, x.detach().t())
        assert not found.requires_grad

    pair(lambda c: begin(c, [4]).push(0, 0, [x.t()]), consumer, specs=(spec, spec))


def test_a57_pulled_values_have_storages_of_their_own() -> None:
    def consumer(channels: TapChannels) -> int:
        begin(channels)
        pulled = channels.pull(0, 0, like(4))
        return len({x.untyped_storage().data_ptr() for x in pulled})

    assert pair(lambda c: begin(c).push(0, 0, values_of(0, 0, 4)), consumer)[1] == 2


def test_a57_credits_block_a_fast_producer() -> None:
    pushed: list[int] = []
    full = threading.Event()

    def producer(channels: TapChannels) -> None:
        begin(channels, [2] * 6)
        for micro_batch in range(6):
            channels.push(0, micro_batch, values_of(0, micro_batch, 2))
            pushed.append(micro_batch)
            if len(pushed) == 2:
                full.set()

    def consumer(channels: TapChannels) -> None:
        begin(channels, [2] * 6)
        assert full.wait(5)
        for micro_batch in range(6):
            time.sleep(0.02)
            assert len(pushed) <= micro_batch + 2
            found = channels.pull(0, micro_batch, like(2))
            assert_bitwise(found, values_of(0, micro_batch, 2))
            channels.release(micro_batch)

    pair(producer, consumer, depth=2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_depth_of_the_schedule_lets_every_forward_push_at_once(name: str) -> None:
    order = build_schedule(name, 2, 5)
    depth = tap_depths(order, [0])[0]
    released = -1

    def consumer(channels: TapChannels) -> None:
        nonlocal released
        begin(channels, [2] * 5)
        for kind, _, m in order[1]:
            if kind == "F":
                channels.pull(0, m, like(2))
            else:
                channels.release(m)
                released = m

    def producer(channels: TapChannels) -> None:
        begin(channels, [2] * 5)
        for kind, _, m in order[0]:
            if kind == "F":
                channels.push(0, m, values_of(0, m, 2))
            else:  # what the arrival of the gradient says
                end = time.monotonic() + 5
                while released < m and time.monotonic() < end:
                    time.sleep(1e-3)
                ready = ring_of(channels).credit
                assert ready >= (1 << 20) + m + 1

    pair(producer, consumer, depth=depth)


def test_rings_grow_when_rows_or_depth_outgrow_them() -> None:
    steps: list[tuple[list[int], int]] = [([3, 8], 2), ([31, 2], 2), ([9, 9], 2), ([4] * 5, 5)]

    def run(channels: TapChannels, pushes: bool) -> tuple[int, int]:
        for step, (rows, depth) in enumerate(steps):
            old = weakref.ref(ring_of(channels))
            channels.begin_step(step, rows, depths={0: depth})
            assert (old() is None) == (step in (1, 3)), "an outgrown ring must be freed"
            for m, n in enumerate(rows):
                if pushes:
                    channels.push(0, m, values_of(step, m, n))
                else:
                    assert_bitwise(channels.pull(0, m, like(n)), values_of(step, m, n))
                    channels.release(m)
        return channels.capacity_rows, ring_of(channels).layout.depth

    grown = pair(lambda c: run(c, True), lambda c: run(c, False), transport="shm")
    assert grown == [(31, 5), (31, 5)]


def test_aborted_step_leaves_nothing_that_a_later_step_takes() -> None:
    rows = [2] * 4

    def producer(channels: TapChannels) -> None:
        channels.begin_step(0, rows)
        for m in range(2):
            channels.push(0, m, values_of(0, m, 2))
        channels.begin_step(1, rows)
        for m in range(4):
            channels.push(0, m, values_of(1, m, 2))

    def consumer(channels: TapChannels) -> None:
        channels.begin_step(0, rows)
        channels.pull(0, 0, like(2))
        channels.begin_step(1, rows)
        for m in range(4):
            assert_bitwise(channels.pull(0, m, like(2)), values_of(1, m, 2))
            channels.release(m)

    pair(producer, consumer, depth=2)


def test_slots_may_be_released_out_of_order() -> None:
    def consumer(channels: TapChannels) -> list[int]:
        begin(channels)
        for m, n in enumerate((4, 2, 7)):
            channels.pull(0, m, like(n))
        credits = []
        for m in (1, 0, 2):
            channels.release(m)
            credits.append(ring_of(channels).credit - (1 << 20))
        return credits

    assert pair(lambda c: push_all(begin(c)), consumer, depth=3)[1] == [0, 2, 3]


def expect_error(
    message: str,
    producer: Callable[[TapChannels], Any],
    spoil: Callable[[TapChannels], Any] = lambda channels: None,
    **options: Any,
) -> None:
    """Pull micro-batch 0 after ``producer`` and ``spoil``, and expect a ChannelError in time."""
    pushed = threading.Event()

    def push(channels: TapChannels) -> None:
        producer(channels)
        pushed.set()

    def consumer(channels: TapChannels) -> None:
        begin(channels)
        assert pushed.wait(10)
        spoil(channels)
        start = time.monotonic()
        with pytest.raises(ChannelError, match=message):
            channels.pull(0, 0, like(4))
        assert time.monotonic() - start < 2

    pair(push, consumer, timeout_s=0.3, **{"transport": "shm", **options})


def push_first(channels: TapChannels) -> None:
    begin(channels).push(0, 0, values_of(0, 0, 4))


def set_stamp(value: int) -> Callable[[TapChannels], None]:
    def spoil(channels: TapChannels) -> None:
        ring = ring_of(channels)
        ring._words[ring.start(0) // 8] = value

    return spoil


def set_bytes(at: int, data: bytes) -> Callable[[TapChannels], None]:
    def spoil(channels: TapChannels) -> None:
        ring = ring_of(channels)
        start = ring.start(0) + at
        ring.buffer[start : start + len(data)] = data

    return spoil


def test_a47_stopped_producer_is_named_within_the_deadline() -> None:
    expect_error(
        r"tap channel 0->1 \(dp0 cp0\), step 0, micro-batch 0: no stamp within 0.3 s: "
        r"expected 1048577 .*found 0",
        begin,
    )


def test_a47_stale_stamp_is_not_taken() -> None:
    expect_error("no stamp within.*found 5", push_first, set_stamp(5))


def test_stamp_of_the_future_is_refused() -> None:
    expect_error(
        "overwritten: expected stamp 1048577, found 1048579", push_first, set_stamp(1048579)
    )


def test_truncated_header_is_refused() -> None:
    expect_error("header is torn", push_first, set_bytes(64 + 40, b"\0" * 40))


def test_flipped_header_bit_is_refused() -> None:
    expect_error("header is torn", push_first, set_bytes(64 + 24, b"\x07"))


@pytest.mark.parametrize("transport", ["loopback", "shm"])
def test_a_push_that_stops_short_is_refused_without_checksums(transport: str) -> None:
    def producer(channels: TapChannels) -> None:
        begin(channels)
        ring = ring_of(channels)
        write = ring.push

        def short(slot: int, stamp: int, header: bytes, values: list[Tensor], wait: Any) -> None:
            write(slot, stamp, header, [value[:3] for value in values], wait)

        with mock.patch.object(ring, "push", short):
            channels.push(0, 0, values_of(0, 0, 4))

    expect_error(r"cut short: values \[0, 1\] of 2", producer, transport=transport)


@pytest.mark.parametrize("whole", [*range(0, 192, 24), 191])
def test_a_slot_that_holds_only_the_first_bytes_of_a_push_is_refused(whole: int) -> None:
    """Its first value, 4 rows of 5 floats, lies at byte 0 of the payload, the second at byte 128."""
    full: list[bytes] = []

    def producer(channels: TapChannels) -> None:
        begin(channels, (4, 4))
        for micro_batch in range(2):
            channels.push(0, micro_batch, values_of(0, micro_batch, 4))
            ring = ring_of(channels)
            at = ring.start(0) + 256
            full.append(ring.buffer[at : at + 192])
            if micro_batch == 1:  # the same slot a second time: what does not come is still there
                ring.buffer[at + whole : at + 192] = full[0][whole:]
                pushed.set()

    pushed = threading.Event()

    def consumer(channels: TapChannels) -> None:
        begin(channels, (4, 4))
        assert_bitwise(channels.pull(0, 0, like(4)), values_of(0, 0, 4))
        channels.release(0)
        assert pushed.wait(10)
        if whole < 128 + 32:
            with pytest.raises(ChannelError, match="cut short"):
                channels.pull(0, 1, like(4))
        else:  # what lies behind the last seal is no part of it
            assert_bitwise(channels.pull(0, 1, like(4)), values_of(0, 1, 4))

    pair(producer, consumer, depth=1, transport="shm")


def test_torn_payload_is_refused_in_debugging() -> None:
    expect_error("checksum differs", push_first, set_bytes(256 + 5, b"\x55\xaa"), debug=True)


def test_header_of_another_plan_is_refused() -> None:
    def producer(channels: TapChannels) -> None:
        begin(channels)
        channels.specs[0] = TapSpec(0, SPEC.widths, SPEC.dtypes, "plan-b")
        channels.push(0, 0, values_of(0, 0, 4))

    expect_error("holds something else; plan: expected", producer)


def test_other_rows_are_refused() -> None:
    def producer(channels: TapChannels) -> None:
        channels.begin_step(0, [3, 2, 7])
        channels.push(0, 0, values_of(0, 0, 3))

    expect_error("rows: expected 4, found 3", producer)


def test_another_micro_batch_is_refused() -> None:
    def producer(channels: TapChannels) -> None:
        channels.begin_step(0, [2, 4, 7])
        channels.push(0, 1, values_of(0, 1, 4))

    expect_error("micro_batch: expected 0, found 1", producer)


def test_producer_refuses_misuse() -> None:
    def producer(channels: TapChannels) -> None:
        with pytest.raises(ChannelError, match="micro-batch 0: the step has 0 micro-batches"):
            channels.push(0, 0, values_of(0, 0, 4))
        begin(channels)
        with pytest.raises(ChannelError, match=r"expected \(rows, width, dtype\) \[\(4, 5"):
            channels.push(0, 0, values_of(0, 0, 3))
        with pytest.raises(InvariantError, match="no such channel to pull"):
            channels.pull(0, 0, like(4))
        channels.push(0, 0, values_of(0, 0, 4))
        with pytest.raises(ChannelError, match="pushed twice"):
            channels.push(0, 0, values_of(0, 0, 4))
        channels.release(0)
        channels.close()
        channels.close()
        with pytest.raises(ChannelError, match="are closed"):
            channels.push(0, 1, values_of(0, 1, 2))

    pair(producer, begin)


def test_consumer_refuses_misuse() -> None:
    def consumer(channels: TapChannels) -> None:
        begin(channels)
        with pytest.raises(InvariantError, match="no such channel to push"):
            channels.push(1, 0, values_of(0, 0, 4))
        with pytest.raises(ChannelError, match="released without being pulled"):
            channels.release(0)
        channels.pull(0, 0, like(4))
        with pytest.raises(ChannelError, match="pulled twice"):
            channels.pull(0, 0, like(4))
        ring_of(channels).buffer[128:136] = b"\x01" * 8
        with pytest.raises(ChannelError, match="overwritten while in use"):
            channels.release(0)

    pair(push_first, consumer, transport="shm")


def test_producer_without_credit_gives_up_within_the_deadline() -> None:
    def producer(channels: TapChannels) -> None:
        begin(channels)
        channels.push(0, 0, values_of(0, 0, 4))
        with pytest.raises(ChannelError, match=r"micro-batch 1: no credit within 0.3 s"):
            channels.push(0, 1, values_of(0, 1, 2))

    pair(producer, begin, depth=1, timeout_s=0.3)


def test_failure_of_a_peer_ends_a_wait_early() -> None:
    waiting = threading.Event()

    def producer(channels: TapChannels) -> None:
        begin(channels)
        assert waiting.wait(10)
        channels.control.fail(BatchError("the loss is not finite"))

    def consumer(channels: TapChannels) -> float:
        begin(channels)
        start = time.monotonic()
        waiting.set()
        with pytest.raises(BatchError, match="the loss is not finite"):
            channels.pull(0, 0, like(4))
        return time.monotonic() - start

    assert pair(producer, consumer, timeout_s=20.0)[1] < 5


def test_use_after_release_reads_nan_in_debugging() -> None:
    def consumer(channels: TapChannels) -> bool:
        begin(channels)
        pulled = channels.pull(0, 0, like(4))
        channels.release(0)
        return all(bool(x.isnan().all()) for x in pulled)

    assert pair(push_first, consumer, debug=True)[1]


def test_a45_stages_that_resolved_other_taps_are_refused_on_every_rank() -> None:
    other = TapSpec(0, (5, 4), SPEC.dtypes, SPEC.plan_hash)
    with pytest.raises(ChannelError, match="has other tap channels"):
        pair(begin, begin, specs=(SPEC, other))


def test_channel_from_the_last_stage_is_refused() -> None:
    spec = TapSpec(1, (5,), (torch.float32,), "plan")
    with pytest.raises(ConfigError, match="need no channel to stage 1"):
        pair(begin, begin, specs=(spec, spec))


def test_ring_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 slot or more for stage 0, found \{0: 0\}"):
        pair(begin, begin, depth=0)


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="found 'pigeon'"):
        pair(begin, begin, transport="pigeon")


def test_full_shared_memory_fails_on_every_rank_and_leaves_nothing() -> None:
    disk = os.statvfs("/dev/shm")
    rows = disk.f_blocks * disk.f_frsize // 16
    seen: list[str] = []
    worlds = thread_worlds(Plan(pp=2, timeout_s=30.0))

    def body(rank: int) -> None:
        with pytest.raises(ChannelError) as caught:
            TapChannels.connect(
                worlds[rank].control,
                [SPEC],
                lane="",
                stages=(rank,),
                num_stages=2,
                depths={0: 2},
                capacity_rows=rows,
                transport="shm",
            )
        seen.append(str(caught.value))

    run_threads(2, body)
    assert len(seen) == 2
    assert all("expected room for" in text for text in seen)
    assert not segments_of(os.getpid())


def test_measure_reports_every_edge_on_every_rank() -> None:
    speeds = pair(measure, measure, transport="shm")
    assert speeds[0] == speeds[1]
    assert list(speeds[0]) == ["dp0 cp0 0->1"]
    assert speeds[0]["dp0 cp0 0->1"] > 0


def connect_process(pipes: tuple[Any, Any], rank: int, timeout_s: float = 30.0) -> TapChannels:
    return TapChannels.connect(
        PipeControl(pipes, rank),
        [SPEC],
        lane="dp0 cp0",
        stages=(rank,),
        num_stages=2,
        depths={0: 3},
        capacity_rows=40,
        timeout_s=timeout_s,
    )


def segments_of(pid: int) -> list[Path]:
    """Names that a process has left in shared memory."""
    return list(Path("/dev/shm").glob(f"spec_compile_{pid}_*"))


def footprint() -> tuple[int, int]:
    """Open handles and mapped spec_compile segments of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/spec_compile")


@pytest.mark.dist
def test_a56_a_thousand_micro_batches_arrive_bitwise_in_constant_memory() -> None:
    pipes = multiprocessing.get_context("fork").Pipe()
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(2, 41, (20, 50), generator=generator).tolist()
    pauses = (torch.rand(2, 1000, generator=generator) * 2e-3).tolist()

    def body(rank: int) -> tuple[str, set[tuple[int, int]]]:
        channels = connect_process(pipes, rank)
        footprints = set()
        for step in range(20):
            channels.begin_step(step, rows[step])
            for m, n in enumerate(rows[step]):
                time.sleep(pauses[rank][50 * step + m])
                if rank == 0:
                    channels.push(0, m, values_of(step, m, n))
                else:
                    assert_bitwise(channels.pull(0, m, like(n)), values_of(step, m, n))
                    channels.release(m)
            footprints.add(footprint())
        return channels.agreed.transports["dp0 cp0 0->1"], footprints

    for transport, footprints in run_processes(2, body):
        assert transport == "shm"
        assert len(footprints) == 1


@pytest.mark.dist
@pytest.mark.parametrize("victim", [0, 1])
def test_a47_killed_end_leaves_nothing_and_the_other_gives_up(victim: int) -> None:
    pipes = multiprocessing.get_context("fork").Pipe()
    connected = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> str:
        channels = connect_process(pipes, rank, timeout_s=1.0)
        begin(channels, [4] * 9)
        if rank == victim:
            connected.set()
            time.sleep(60)
        connected.wait(10)

        def run() -> None:
            for m in range(9):
                if rank == 0:
                    channels.push(0, m, values_of(0, m, 4))
                else:
                    channels.pull(0, m, like(4))

        with pytest.raises(ChannelError) as caught:
            run()
        return str(caught.value)

    started: list[int] = []

    def kill(pids: list[int]) -> None:
        started.extend(pids)
        assert connected.wait(20)
        os.kill(pids[victim], signal.SIGKILL)

    outcomes = process_outcomes(2, body, timeout=30, during=kill)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert ("no credit" if victim else "no stamp") in outcomes[1 - victim].value
    assert len(started) == 2
    assert not [path for pid in started for path in segments_of(pid)]


@pytest.mark.dist
def test_loopback_between_processes_is_refused() -> None:
    pipes = multiprocessing.get_context("fork").Pipe()

    def body(rank: int) -> None:
        with pytest.raises(ChannelError, match="need tap_transport='shm'"):
            TapChannels.connect(
                PipeControl(pipes, rank),
                [SPEC],
                lane="",
                stages=(rank,),
                num_stages=2,
                depths={0: 1},
                capacity_rows=2,
                transport="loopback",
            )

    run_processes(2, body)

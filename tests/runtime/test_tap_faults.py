"""Tap channels: what a lost, late, torn, stale or foreign value ends in."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spec_compile.errors import BatchError, ChannelError, ConfigError, InvariantError
from spec_compile.plan import Plan
from spec_compile.runtime.taps import TapChannels, TapSpec
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads

from .tap_pairs import (
    SPEC,
    assert_bitwise,
    begin,
    like,
    pair,
    ring_of,
    segments_of,
    values_of,
)


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

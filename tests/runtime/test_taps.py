"""Tap channels: values, order, credits, and memory."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from spec_compile.plan import Plan
from spec_compile.runtime.schedule import build_schedule, tap_depths
from spec_compile.runtime.tap_measure import measure
from spec_compile.runtime.taps import TapChannels, TapSpec
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads

from .tap_pairs import (
    assert_bitwise,
    begin,
    like,
    pair,
    push_all,
    ring_of,
    values_of,
)


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


def test_measure_reports_every_edge_on_every_rank() -> None:
    speeds = pair(measure, measure, transport="shm")
    assert speeds[0] == speeds[1]
    assert list(speeds[0]) == ["dp0 cp0 0->1"]
    assert speeds[0]["dp0 cp0 0->1"] > 0

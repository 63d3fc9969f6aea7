"""Taps in a peer's device memory, in processes, over a device made of host memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spec_compile.errors import ChannelError, ConfigError
from spec_compile.plan import Plan
from spec_compile.runtime import tap_setup
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.cuda_ipc_taps import CudaIpcTaps
from spec_compile.runtime.processes import join
from spec_compile.runtime.tap_slot import TapSpec
from spec_compile.runtime.tap_transport import Setting
from spec_compile.runtime.taps import TapChannels
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import process_outcomes, run_processes

from .plain_engine import PlainEngine, PlainLane

SPEC = TapSpec(0, (6, 3), (torch.float32, torch.bfloat16), "plan")
ROWS = [5, 0, 40, 1, 17, 33]


def connect(rank: int, depth: int, timeout_s: float, engine: PlainEngine, **options: Any) -> Any:
    """Stage ``rank`` of two; the transport's device is ``engine``, whatever name it is chosen by."""
    control = join(2, timeout_s=timeout_s)
    with mock.patch.object(tap_setup, "open_transport", lambda _, s: CudaIpcTaps(s, engine)):
        channels = TapChannels.connect(
            control, [SPEC], lane="dp0 cp0", stages=(rank,), num_stages=2, depths={0: depth},
            capacity_rows=2, transport="shm", timeout_s=timeout_s, **options,
        )  # fmt: skip
    return control, channels


def values_of(step: int, micro_batch: int) -> list[Tensor]:
    rows = ROWS[micro_batch]
    drawn = torch.Generator().manual_seed(100 * step + micro_batch)
    return [
        torch.randn(rows, w, generator=drawn).to(d)
        for w, d in zip(SPEC.widths, SPEC.dtypes, strict=True)
    ]


def run_step(rank: int, channels: TapChannels, step: int, held: int) -> None:
    """Push all; pull ``held`` ahead of the release, and look at the values at the last moment."""
    channels.begin_step(step, ROWS)
    if rank == 0:
        for mb in range(len(ROWS)):
            channels.push(0, mb, values_of(step, mb))
        return
    pulled: dict[int, list[Tensor]] = {}
    for mb in range(len(ROWS) + held - 1):
        if mb < len(ROWS):
            pulled[mb] = channels.pull(0, mb, values_of(step, mb))
        if mb - held + 1 >= 0:
            old = mb - held + 1
            for found, expected in zip(pulled.pop(old), values_of(step, old), strict=True):
                assert torch.equal(found, expected)
            channels.release(old)


@pytest.mark.dist
@pytest.mark.parametrize(("debug", "shared"), [(False, False), (True, False), (False, True)])
def test_a59_taps_are_those_that_were_pushed_while_slots_are_used_again(
    debug: bool, shared: bool
) -> None:
    """A draft pulls before the payload is there, on a device of its own and on the source's."""

    def body(rank: int) -> int:
        engine = PlainEngine(delay_s=0.002, shared=shared)
        control, channels = connect(rank, 2, 20.0, engine, debug=debug)
        for step in range(4):
            run_step(rank, channels, step, held=2)
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()
        assert engine.freed == len(engine.allocated)
        return os.getpid()

    for pid in run_processes(2, body):
        assert not list(Path("/dev/shm").glob(f"spec_compile_{pid}_*"))


@pytest.mark.dist
def test_a_device_waits_for_nothing_that_its_host_finds_done() -> None:
    def body(rank: int) -> int:
        engine = PlainEngine()
        control, channels = connect(rank, 2, 20.0, engine)
        channels.begin_step(0, ROWS)
        for mb in range(4):  # each end acts when the other one's device has done its part
            if rank == 0:
                channels.push(0, mb, values_of(0, mb))
                engine.finish()
            control.all_gather(None, deadline_s=20.0)
            if rank == 1:
                pulled = channels.pull(0, mb, values_of(0, mb))
                for found, expected in zip(pulled, values_of(0, mb), strict=True):
                    assert torch.equal(found, expected)
                channels.release(mb)
            control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()
        return engine.waits

    assert run_processes(2, body) == [0, 0]


@pytest.mark.dist
@pytest.mark.parametrize("shared", [False, True])
def test_a_draft_s_device_is_made_to_wait_only_where_it_could_go_on_meanwhile(shared: bool) -> None:
    def body(rank: int) -> int:
        engine = PlainEngine(delay_s=0.05, shared=shared)
        control, channels = connect(rank, 6, 20.0, engine)
        run_step(rank, channels, 0, held=1)
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()
        return engine.waits

    waits = run_processes(2, body)[1]
    assert waits == 0 if shared else waits > 0


@pytest.mark.dist
@pytest.mark.parametrize("shared", [False, True])
def test_a59_a_slot_is_not_used_again_while_work_that_reads_it_is_queued(shared: bool) -> None:
    """The draft's host releases at once, and its device reads later; the source pushes at once."""

    def body(rank: int) -> None:
        current = PlainLane(delay_s=0.03) if rank else None
        engine = PlainEngine(shared=shared, current=current)
        control, channels = connect(rank, 1, 20.0, engine)
        copies = []
        for step in range(2):  # a new step gives credit too
            channels.begin_step(step, ROWS)
            for mb in range(len(ROWS)):
                if rank == 0:
                    channels.push(0, mb, values_of(step, mb))
                    continue
                pulled = channels.pull(0, mb, values_of(step, mb))
                out = [torch.empty_like(x) for x in pulled]
                for x, y in zip(pulled, out, strict=True):
                    engine.current_lane().copy(y.data_ptr(), x.data_ptr(), x.nbytes)
                channels.release(mb)
                copies.append((step, mb, out))
        engine.finish()
        for step, mb, out in copies:
            for found, expected in zip(out, values_of(step, mb), strict=True):
                assert torch.equal(found, expected)
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()

    run_processes(2, body)


@pytest.mark.dist
def test_a59_credit_on_one_stream_waits_for_reads_on_another_that_were_released_before() -> None:
    def body(rank: int) -> None:
        engine = PlainEngine(current=PlainLane(delay_s=0.2) if rank else None)
        control, channels = connect(rank, 2, 20.0, engine)
        channels.begin_step(0, ROWS)
        if rank == 0:
            for mb in range(5):
                channels.push(0, mb, values_of(0, mb))
        else:
            (first, _) = channels.pull(0, 0, values_of(0, 0))
            out = torch.empty_like(first)
            engine.current_lane().copy(out.data_ptr(), first.data_ptr(), first.nbytes)
            channels.release(0)
            slow, engine.current = engine.current, PlainLane()
            for mb in (1, 2):
                channels.pull(0, mb, values_of(0, mb))
                channels.release(mb)
            assert slow.mark().wait(20.0)
            engine.finish()
            assert torch.equal(out, values_of(0, 0)[0])
            for mb in (3, 4):  # nor does the later credit get lost
                channels.pull(0, mb, values_of(0, mb))
                channels.release(mb)
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()

    run_processes(2, body)


@pytest.mark.dist
def test_values_outlive_the_channel() -> None:
    def body(rank: int) -> None:
        control, channels = connect(rank, 6, 20.0, PlainEngine())
        channels.begin_step(0, ROWS)
        if rank == 0:
            channels.push(0, 0, values_of(0, 0))
        else:
            pulled = channels.pull(0, 0, values_of(0, 0))
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        if rank == 1:
            for found, expected in zip(pulled, values_of(0, 0), strict=True):
                assert torch.equal(found, expected)

    run_processes(2, body)


@pytest.mark.dist
def test_a_slot_that_was_first_read_in_inference_mode_serves_gradients_later() -> None:
    def body(rank: int) -> None:
        control, channels = connect(rank, 1, 20.0, PlainEngine())
        for step in range(2):
            channels.begin_step(step, ROWS)
            if rank == 0:
                channels.push(0, 0, values_of(0, 0))
                continue
            with torch.inference_mode(step == 0):
                x, _ = channels.pull(0, 0, values_of(0, 0))
                weight = torch.ones(6, requires_grad=step == 1)
                total = (x * weight).sum()
            if step == 1:
                total.backward()
                torch.testing.assert_close(weight.grad, values_of(0, 0)[0].sum(0))
            channels.release(0)
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()

    run_processes(2, body)


@pytest.mark.dist
@pytest.mark.parametrize(("dead", "shared"), [(0, False), (0, True), (1, False)])
def test_a_killed_end_ends_the_other_ones_wait_on_host_and_device(dead: int, shared: bool) -> None:
    """Killed are a source whose copy was announced and not made, and a draft that holds all slots."""

    def body(rank: int) -> None:
        engine = PlainEngine(delay_s=60.0 if dead == 0 == rank else 0.0, shared=shared)
        _, channels = connect(rank, 1, 5.0, engine)
        channels.begin_step(0, ROWS)
        if rank == dead == 0:
            channels.push(0, 0, values_of(0, 0))
        if rank == dead:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        run_step(rank, channels, 1, held=1)

    outcome = process_outcomes(2, body)[1 - dead]
    assert isinstance(outcome.error, ChannelError), outcome
    assert f"rank {dead} died" in str(outcome.error)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shared", "told"),
    [(False, "payload: the device waits since 1 s"), (True, "no payload within 1 s")],
)
def test_a_payload_that_never_lands_ends_the_draft_by_its_deadline(shared: bool, told: str) -> None:
    def body(rank: int) -> float:
        engine = PlainEngine(delay_s=60.0 if rank == 0 else 0.0, shared=shared)
        control, channels = connect(rank, 1, 1.0, engine)
        channels.begin_step(0, ROWS)
        if rank == 0:
            channels.push(0, 0, values_of(0, 0))
            control.latch.wait(20.0)
            return 0.0
        start = time.monotonic()
        with pytest.raises(ChannelError, match=told):
            _pull_and_check(control, channels)
        control.fail(ChannelError(told))
        return time.monotonic() - start

    assert run_processes(2, body)[1] < 4.0


def _pull_and_check(control: SocketControl, channels: TapChannels) -> None:
    channels.pull(0, 0, values_of(0, 0))
    control.check()  # where a device was let go on, it has computed for nothing


@pytest.mark.dist
def test_a_push_that_stops_short_is_refused() -> None:
    def body(rank: int) -> None:
        control, channels = connect(rank, 2, 10.0, PlainEngine())
        channels.begin_step(0, ROWS)
        if rank == 0:
            ring = channels.rings.writers[0]
            write = ring.push

            def short(slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
                write(slot, stamp, header, [value[:3] for value in values], wait)

            with mock.patch.object(ring, "push", short):
                channels.push(0, 0, values_of(0, 0))
        else:
            with pytest.raises(ChannelError, match=r"micro-batch 0: the payload is cut short"):
                channels.pull(0, 0, values_of(0, 0))
        control.all_gather(None, deadline_s=20.0)
        channels.close()
        control.close()

    run_processes(2, body)


def test_threads_of_one_process_are_refused() -> None:
    world = thread_worlds(Plan(pp=2))[0]
    setting = Setting(world.control, world.device, 1.0, ((0, 1),))
    with pytest.raises(ConfigError, match="joins processes"):
        CudaIpcTaps(setting, PlainEngine())


def test_tensors_that_are_not_on_a_gpu_are_refused() -> None:
    control = SocketControl(0, 1, {}, timeout_s=1.0)
    with pytest.raises(ConfigError, match="needs CUDA devices, found cpu"):
        CudaIpcTaps(Setting(control, torch.device("cpu"), 1.0, ((0,),)))
    control.close()

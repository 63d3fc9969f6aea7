"""Tap channels between processes: memory over a thousand values, and a killed end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_compile.errors import ChannelError
from spec_compile.runtime.taps import TapChannels
from tests.ranks import process_outcomes, run_processes

from .tap_pairs import (
    SPEC,
    assert_bitwise,
    begin,
    like,
    segments_of,
    values_of,
)


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


def connect_process(pipes: tuple[Any, Any], rank: int, **options: Any) -> TapChannels:
    return TapChannels.connect(
        PipeControl(pipes, rank),
        [SPEC],
        lane="dp0 cp0",
        stages=(rank,),
        num_stages=2,
        depths={0: 3},
        capacity_rows=40,
        **{"timeout_s": 30.0, **options},
    )


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
            connect_process(pipes, rank, transport="loopback")

    run_processes(2, body)

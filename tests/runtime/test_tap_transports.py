"""Tap transports between processes: equal bits, growth, credits, empty micro-batches, refusals, dead ends."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spec_compile.errors import ChannelError, ConfigError
from spec_compile.plan import Plan
from spec_compile.runtime import tap_measure
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.processes import join
from spec_compile.runtime.tap_choice import Hello, choose
from spec_compile.runtime.tap_measure import measure, self_test
from spec_compile.runtime.taps import TapChannels, TapSpec
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import process_outcomes, run_processes, run_threads

SPECS = [
    TapSpec(0, (5, 3), (torch.float32, torch.bfloat16), "plan"),
    TapSpec(1, (4,), (torch.float64,), "plan"),
]
TRANSPORTS = ["shm", "c10d", pytest.param("nixl", marks=pytest.mark.nixl)]
pytestmark = pytest.mark.dist


def values_of(step: int, micro_batch: int, rows: int, spec: TapSpec) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 7 * micro_batch + spec.source)
    return [
        torch.randn(rows, width, generator=generator).to(dtype)
        for width, dtype in zip(spec.widths, spec.dtypes, strict=True)
    ]


def like(rows: int, spec: TapSpec) -> list[Tensor]:
    pairs = zip(spec.widths, spec.dtypes, strict=True)
    return [torch.empty(rows, width, dtype=dtype, device="meta") for width, dtype in pairs]


def connect(
    rank: int, transport: str, pp: int, timeout_s: float = 30.0, *, debug: bool = True
) -> TapChannels:
    control = join(pp, timeout_s=timeout_s)
    assert isinstance(control, SocketControl)
    specs = [spec for spec in SPECS if spec.source < pp - 1]
    return TapChannels.connect(
        control,
        specs,
        lane="dp0 cp0",
        stages=(rank,),
        num_stages=pp,
        depths={spec.source: 2 for spec in specs},
        capacity_rows=4,
        transport=transport,
        timeout_s=timeout_s,
        debug=debug,
    )


def leave(channels: TapChannels) -> None:
    """Close once everything has arrived, as a call of a model ends with a gather too."""
    channels.control.all_gather("done", deadline_s=20.0)
    channels.close()
    channels.control.close()


def run_step(channels: TapChannels, step: int, rows: list[int]) -> None:
    """One step of whichever end this is; pulled values are compared bit by bit."""
    channels.begin_step(step, rows)
    for micro_batch, n in enumerate(rows):
        for source, spec in channels.specs.items():
            expected = values_of(step, micro_batch, n, spec)
            if source in channels.rings.writers:
                channels.push(source, micro_batch, expected)
                for value in expected:
                    value.fill_(float("nan"))  # the sender may reuse its memory at once
            elif source in channels.rings.readers:
                found = channels.pull(source, micro_batch, like(n, spec))
                for x, y in zip(found, expected, strict=True):
                    assert x.dtype == y.dtype
                    assert torch.equal(
                        x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
                    )
                assert len({x.untyped_storage().data_ptr() for x in found}) == len(found) or n == 0
        channels.release(micro_batch)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a57_taps_arrive_bitwise_while_rings_grow(transport: str) -> None:
    steps = [[4, 2, 0, 3, 1], [2], [9, 0, 31], [31, 30, 1, 2, 3, 4]]

    def body(rank: int) -> dict[str, str]:
        channels = connect(rank, transport, 3)
        for step, rows in enumerate(steps):
            run_step(channels, step, rows)
        used = channels.agreed.transports
        leave(channels)
        return used

    for used in run_processes(3, body, timeout=100):
        assert used == {"dp0 cp0 0->2": transport, "dp0 cp0 1->2": transport}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a55_the_self_test_measures_every_edge_and_changes_nothing(transport: str) -> None:
    def body(rank: int) -> dict[str, float]:
        channels = connect(rank, transport, 2)
        run_step(channels, 0, [4, 2, 3])
        before = (channels.depths, channels.capacity_rows)
        speeds = measure(channels)
        assert (channels.depths, channels.capacity_rows) == before
        run_step(channels, 1, [4, 2, 3])
        leave(channels)
        return speeds

    first, second = run_processes(2, body, timeout=100)
    assert first == second
    assert list(first) == ["dp0 cp0 0->1"]
    assert first["dp0 cp0 0->1"] > 0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_end_ends_the_other_with_an_error_that_names_it(
    transport: str, victim: int
) -> None:
    def body(rank: int) -> str:
        channels = connect(rank, transport, 2, timeout_s=20.0)
        run_step(channels, 0, [2, 2])
        if rank == victim:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ChannelError) as caught:
            run_step(channels, 1, [4] * 9)
        return str(caught.value)

    outcomes = process_outcomes(2, body, timeout=60)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert f"rank {victim} died" in outcomes[1 - victim].value, outcomes[1 - victim].text
    assert outcomes[1 - victim].exitcode == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_end_that_stops_pushing_is_named_within_the_deadline(transport: str) -> None:
    def body(rank: int) -> str:
        channels = connect(rank, transport, 2, timeout_s=1.5)
        channels.begin_step(3, [4, 4])
        text = ""
        if rank == 1:
            with pytest.raises(ChannelError) as caught:
                channels.pull(0, 0, like(4, SPECS[0]))
            text = str(caught.value)
        channels.control.all_gather("done", deadline_s=20.0)
        return text

    text = run_processes(2, body)[1]
    assert "tap channel 0->1 (dp0 cp0), step 3, micro-batch 0" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a46_a_skipped_micro_batch_is_refused(transport: str) -> None:
    def body(rank: int) -> str:
        channels = connect(rank, transport, 2, timeout_s=10.0)
        channels.begin_step(0, [4, 4])
        text = ""
        if rank == 0:
            channels.push(0, 1, values_of(0, 1, 4, SPECS[0]))
        else:
            with pytest.raises(ChannelError) as caught:
                channels.pull(0, 0, like(4, SPECS[0]))
            text = str(caught.value)
        channels.control.all_gather("done", deadline_s=20.0)
        return text

    assert "micro_batch: expected 0, found 1" in run_processes(2, body)[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_push_that_stops_short_is_refused_without_checksums(transport: str) -> None:
    def body(rank: int) -> str:
        channels = connect(rank, transport, 2, timeout_s=10.0, debug=False)
        run_step(channels, 0, [4, 4])
        channels.begin_step(1, [4])
        text = ""
        if rank == 0:
            ring = channels.rings.writers[0]
            write = ring.push

            def short(slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
                write(slot, stamp, header, [value[:2] for value in values], wait)

            with mock.patch.object(ring, "push", short):
                channels.push(0, 0, values_of(1, 0, 4, SPECS[0]))
        else:
            with pytest.raises(ChannelError) as caught:
                channels.pull(0, 0, like(4, SPECS[0]))
            text = str(caught.value)
        channels.control.all_gather("done", deadline_s=20.0)
        return text

    text = run_processes(2, body)[1]
    assert "step 1, micro-batch 0: the payload is cut short: values [0, 1] of 2" in text


def test_a58_the_first_tap_is_never_lost_however_the_ends_start() -> None:
    """A fast source pushes at once, while the other end may still be on its way."""
    dice = random.Random(3)
    pauses = [[dice.random() * 4e-3 for _ in range(2)] for _ in range(100)]

    def start(rank: int, worlds: Any, pause: float) -> None:
        channels = TapChannels.connect(
            worlds[rank].control,
            SPECS[:1],
            lane="dp0 cp0",
            stages=(rank,),
            num_stages=2,
            depths={0: 1},
            capacity_rows=4,
            transport="shm",
            timeout_s=10.0,
        )
        time.sleep(pause)
        run_step(channels, 0, [4, 3])
        channels.close()

    for pair in pauses:
        worlds = thread_worlds(Plan(pp=2, timeout_s=20.0))
        run_threads(2, lambda rank, w=worlds, p=pair: start(rank, w, p[rank]))  # type: ignore[misc]


def hello(rank: int, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "lane": "dp0",
        "stages": (rank,),
        "specs": "",
        "process": f"p{rank}",
        "host": "a",
        "device": "cpu",
        "has": ("shm", "nixl", "c10d"),
    }
    return Hello(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "shm"),
        ({"process": "p0"}, "loopback"),
        ({"host": "b"}, "nixl"),
        ({"host": "b", "has": ("shm", "c10d")}, "c10d"),
        ({"device": "cuda"}, "shm"),
    ],
)
def test_auto_picks_by_process_host_device_and_package(
    changes: dict[str, Any], expected: str
) -> None:
    assert choose(hello(0), hello(1, **changes), "auto") == expected
    assert choose(hello(1, **changes), hello(0), "auto") == expected


def test_auto_takes_cuda_ipc_between_gpus_of_one_host() -> None:
    ends = [hello(r, device="cuda", has=("shm", "cuda_ipc", "nixl")) for r in (0, 1)]
    assert choose(ends[0], ends[1], "auto") == "cuda_ipc"


def test_stages_of_one_rank_have_nothing_to_transport() -> None:
    assert choose(hello(0), hello(0), "nixl") == "loopback"


@pytest.mark.parametrize(
    ("asked", "need"), [("nixl", "nixl_cu13"), ("c10d", "torchrun"), ("cuda_ipc", "CUDA devices")]
)
def test_a_transport_that_an_end_lacks_is_refused(asked: str, need: str) -> None:
    with pytest.raises(ConfigError, match=r"stages \[1\].* lacks.*'auto'") as caught:
        choose(hello(0, has=("shm", asked)), hello(1, has=("shm",)), asked)
    assert need in str(caught.value)


@pytest.mark.parametrize("transport", ["c10d", "cuda_ipc"])
def test_threads_refuse_transports_between_processes_on_every_rank(transport: str) -> None:
    worlds = thread_worlds(Plan(pp=2, timeout_s=20.0))

    def body(rank: int) -> None:
        with pytest.raises(ConfigError, match=f"'{transport}' needs"):
            TapChannels.connect(
                worlds[rank].control,
                SPECS[:1],
                lane="",
                stages=(rank,),
                num_stages=2,
                depths={0: 1},
                capacity_rows=2,
                transport=transport,
            )

    run_threads(2, body)


def test_a54_a55_a_slow_path_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    worlds = thread_worlds(Plan(pp=2, timeout_s=20.0))

    def body(rank: int) -> None:
        channels = TapChannels.connect(
            worlds[rank].control,
            SPECS[:1],
            lane="dp0 cp0",
            stages=(rank,),
            num_stages=2,
            depths={0: 2},
            capacity_rows=2,
            transport="shm",
        )
        self_test(channels)

    floors = {("shm", "cpu"): (1e9, "memory is slow")}
    with mock.patch.object(tap_measure, "FLOORS", floors), caplog.at_level("INFO"):
        run_threads(2, body)
    told = [
        (r.levelname, r.getMessage()) for r in caplog.records if "tap channel" in r.getMessage()
    ]
    assert [level for level, _ in told] == ["INFO", "WARNING"]
    assert "tap channel dp0 cp0 0->1 over shm" in told[0][1]
    assert told[1][1].endswith("memory is slow")

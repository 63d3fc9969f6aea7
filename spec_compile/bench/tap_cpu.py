"""Taps between two processes on one host without a GPU: bandwidth, latency, and their share of a step.

A plain copy inside one process, in the same run, is the ideal of every transport.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.model import ParallelModel
from spec_compile.runtime.processes import join
from spec_compile.runtime.tap_slot import TapSpec
from spec_compile.runtime.taps import TapChannels
from spec_compile.runtime.timeline import Recorder, recording
from spec_compile.runtime.timeline_picture import seconds_by_kind

from .timing import Timing
from .two_processes import spawn, stream

MIB = 1 << 20
WAIT_S = 60.0
DEPTH = 4
WIDTH = 1024
"""Elements a row, float32."""
BYTES_A_SAMPLE = 1 << 27
LATENCY_BYTES = 4 * MIB
VOCABULARY = 512
"""Ids that batches draw from; models need as many."""
WARMUP = 2
TAPS = ("push", "credit", "stamp")
"""Spans of a step that are there for taps alone."""


def transports() -> list[str]:
    """Transports between processes that work here without a GPU."""
    nixl = ["nixl"] if importlib.util.find_spec("nixl_cu13") is not None else []
    return ["shm", *nixl, "c10d"]


@dataclass(frozen=True)
class TapRow:
    """One transport and size of payload; GB/s as median (low-high) over the repeats."""

    transport: str
    payload_mib: float
    copy: Timing
    """A copy inside one process."""
    channel: Timing

    HEADER = "transport   payload MiB   copy GB/s               channel GB/s            of the copy"

    def __str__(self) -> str:
        share = self.channel.median / self.copy.median
        return (
            f"{self.transport:9}   {self.payload_mib:11g}   {self.copy!s:23} {self.channel!s:23} "
            f"{share:.0%}"
        )


def measure_taps(sizes_mib: Sequence[float], repeats: int) -> Iterator[str]:
    """Yield the lines of a table over `transports`, and the latency of a tap of 4 MiB by each."""
    yield TapRow.HEADER
    latencies = []
    for transport in transports():
        rows, latency = spawn(_measure_taps, transport, tuple(sizes_mib), repeats)[1]
        yield from map(str, rows)
        latencies.append(f"{transport} {latency} us")
    yield f"{LATENCY_BYTES / MIB:g} MiB, from push to pull: {'; '.join(latencies)}"


def measure_steps(
    build: Callable[[int], ParallelModel], hidden_sizes: Sequence[int], tokens: int, repeats: int
) -> Iterator[str]:
    """Yield a line a hidden size: a step of two stages, and what the slower rank spends on taps.

    Args:
        build: a function of a module, so that fresh processes find it; makes the model of a hidden size.
        hidden_sizes: given to ``build``.
        tokens: of a batch, in four documents.
        repeats: steps that count.
    """
    yield "hidden   step ms                       taps ms                 taps of the step"
    found = stream(_measure_steps, build, tuple(hidden_sizes), tokens, repeats)
    for hidden, (_, (step, taps)) in zip(hidden_sizes, found, strict=True):
        yield f"{hidden:6}   {step!s:29} {taps!s:23} {taps.median / step.median:.2%}"


def _measure_taps(
    rank: int, transport: str, sizes_mib: Sequence[float], repeats: int
) -> tuple[list[TapRow], Timing]:
    control = join(2, timeout_s=WAIT_S)
    assert isinstance(control, SocketControl)
    rows = []
    for size in sizes_mib:
        num_rows = int(size * MIB) // (4 * WIDTH)
        copy = _copies(rank, control, num_rows, repeats)
        rows.append(
            TapRow(transport, size, copy, _channel(rank, control, transport, num_rows, repeats))
        )
    latency = _latency(rank, control, transport, max(20, 4 * repeats))
    control.close()
    return rows, latency


def _copies(rank: int, control: SocketControl, num_rows: int, repeats: int) -> Timing:
    source, target = torch.ones(num_rows, WIDTH), torch.ones(num_rows, WIDTH)

    def body() -> None:
        for _ in range(_count(num_rows)):
            target.copy_(source)

    return _speeds(control, num_rows, repeats, (lambda: None) if rank else body)


def _channel(
    rank: int, control: SocketControl, transport: str, num_rows: int, repeats: int
) -> Timing:
    channels, values = _connect(rank, control, transport, num_rows), [torch.ones(num_rows, WIDTH)]
    number = _count(num_rows)

    def body() -> None:
        channels.begin_step(1, [num_rows] * number)
        for micro_batch in range(number):
            _move(channels, micro_batch, values)

    found = _speeds(control, num_rows, repeats, body)
    channels.close()
    return found


def _move(channels: TapChannels, micro_batch: int, values: list[Tensor]) -> None:
    """Push on rank 0; pull and release on rank 1."""
    if channels.rings.writers:
        channels.push(0, micro_batch, values)
    else:
        channels.pull(0, micro_batch, values)
        channels.release(micro_batch)


def _latency(rank: int, control: SocketControl, transport: str, repeats: int) -> Timing:
    """Microseconds from the call of push to the end of pull, on the clock of the host."""
    num_rows = LATENCY_BYTES // (4 * WIDTH)
    channels, values = _connect(rank, control, transport, num_rows), [torch.ones(num_rows, WIDTH)]
    channels.begin_step(1, [num_rows] * repeats)
    samples = []
    for micro_batch in range(repeats):
        control.all_gather(None, deadline_s=WAIT_S)
        if rank == 0:
            time.sleep(1e-3)  # the reader waits already
            at = time.perf_counter()
            channels.push(0, micro_batch, values)
        else:
            channels.pull(0, micro_batch, values)
            at = time.perf_counter()
            channels.release(micro_batch)
        begun, seen = control.all_gather(at, deadline_s=WAIT_S)
        samples.append((seen - begun) * 1e6)
    channels.close()
    return Timing.of(samples[repeats // 4 :])


def _connect(rank: int, control: SocketControl, transport: str, num_rows: int) -> TapChannels:
    return TapChannels.connect(
        control, [TapSpec(0, (WIDTH,), (torch.float32,), "bench")], lane="dp0 cp0",
        stages=(rank,), num_stages=2, depths={0: DEPTH}, capacity_rows=num_rows,
        transport=transport, timeout_s=WAIT_S,
    )  # fmt: skip


def _speeds(
    control: SocketControl, num_rows: int, repeats: int, body: Callable[[], None]
) -> Timing:
    """GB/s over the longer of both ranks' times; the first runs do not count."""
    samples = []
    for _ in range(repeats + WARMUP):
        control.all_gather(None, deadline_s=WAIT_S)
        start = time.perf_counter()
        body()
        seconds = max(control.all_gather(time.perf_counter() - start, deadline_s=WAIT_S))
        samples.append(_count(num_rows) * num_rows * WIDTH * 4 / seconds / 1e9)
    return Timing.of(samples[WARMUP:])


def _count(num_rows: int) -> int:
    return max(4, BYTES_A_SAMPLE // max(1, num_rows * WIDTH * 4))


def _measure_steps(
    rank: int, build: Callable[[int], ParallelModel], hidden_sizes: Sequence[int], tokens: int,
    repeats: int,
) -> Iterator[tuple[Timing, Timing]]:  # fmt: skip
    for hidden in hidden_sizes:
        yield _measure_step(build, hidden, tokens, repeats)


def _measure_step(
    build: Callable[[int], ParallelModel], hidden: int, tokens: int, repeats: int
) -> tuple[Timing, Timing]:
    model = build(hidden)
    control, batch = model._world.control, _batch(tokens)
    steps, taps = [], []
    for _ in range(repeats + 1):
        recorder = Recorder(torch.device("cpu"))
        start = time.perf_counter()
        with recording(recorder):
            model.step(batch, _loss)
        spent = seconds_by_kind(recorder.spans())
        mine = [time.perf_counter() - start, sum(spent.get(kind, 0.0) for kind in TAPS)]
        both = control.all_gather(mine, deadline_s=WAIT_S)
        steps.append(max(one[0] for one in both) * 1e3)
        taps.append(max(one[1] for one in both) * 1e3)
    model.close()
    return Timing.of(steps[1:]), Timing.of(taps[1:])


def _loss(rows: TokenOutputs) -> Tensor:
    return -(rows.logprobs * rows.mask).sum()


def _batch(tokens: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(
        torch.randint(0, VOCABULARY, (tokens,), generator=generator),
        torch.tensor([*range(0, tokens, max(1, -(-tokens // 4))), tokens]),
        torch.ones(tokens, dtype=torch.bool),
    )

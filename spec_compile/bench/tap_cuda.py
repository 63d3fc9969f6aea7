"""Taps between two processes over CUDA IPC: bandwidth and latency.

Both processes use one GPU where there is one, else a GPU each. Every figure stands beside a raw
device copy into memory of the other process and beside staging through pinned host memory, made in
the same run by the same processes. The reader computes nothing: where it shares the writer's GPU,
the turns that its own work would take are in no figure of this table.

A channel's bandwidth is that of its steady state. Both processes look at one clock, which all of a
host share; a sample runs from the later of both starts, so it holds nothing of how they leave the
barrier before it, to the later of both ends, when both devices are done. A writer that starts first
may have filled the ring by then: so many payloads are not counted, whoever started first. Copies and
staging are made by one process and timed by its own start and end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from spec_compile.runtime.cuda_driver import CudaEngine

from .goals import BANDWIDTH, BANDWIDTH_FROM_MIB, LATENCY, OF_RAW, OF_STAGING, ONE_GPU_FROM_MIB
from .tap_latency import WAITED_S, measure_latency
from .tap_pair import DEPTH, Pair, rows_of
from .timing import Timing
from .two_processes import stream

BYTES_A_SAMPLE = 1 << 33
"""At least."""
PAYLOADS_A_SAMPLE = 256
"""At least: so many that the first and the last one, which nothing overlaps, weigh little."""
STAGED_BYTES = 1 << 29
"""Staging is slow, and one process does it."""
WARMUP = 2
"""Samples that do not count: the first ones map memory and load kernels."""
MIB = 1 << 20
LATENCY_BYTES = 4 * MIB


@dataclass(frozen=True)
class TapRow:
    """One size of payload; GB/s as median (low-high) over the repeats."""

    payload_mib: float
    raw: Timing
    """A device copy into memory of the other process."""
    channel: Timing
    staged: Timing
    """Through pinned host memory, by one process."""

    HEADER = "payload MiB   raw copy GB/s           channel GB/s            of raw   staged GB/s"

    def __str__(self) -> str:
        share = self.channel.median / self.raw.median
        return (
            f"{self.payload_mib:11.1f}   {self.raw!s:23} {self.channel!s:23} {share:6.1%}   "
            f"{self.staged!s} ({self.channel.median / self.staged.median:.0f}x)"
        )


def measure_taps(sizes_mib: Sequence[int], repeats: int) -> Iterator[str]:
    """Yield lines of a table, the latency of a tap of 4 MiB, and how all of them stand to their goals."""
    yield (
        f"channel: {PAYLOADS_A_SAMPLE} payloads a sample and more, from the later start of both processes to "
        f"the later end, {DEPTH} payloads that a head start may hide not counted"
    )
    yield TapRow.HEADER
    rows: list[TapRow] = []
    latencies: list[Timing] = []
    for _, found in stream(_measure_taps, tuple(sizes_mib), repeats):
        if isinstance(found, TapRow):
            rows.append(found)
            yield str(found)
        else:
            latencies.append(found)
    in_step, from_call = latencies
    num_gpus, size = torch.cuda.device_count(), f"{LATENCY_BYTES / MIB:.0f} MiB"
    how = "the pull queued too" if num_gpus > 1 else "the draft's host waiting for the payload"
    yield (
        f"latency in a step, {size}: from the source's device going on, the push queued behind, to the "
        f"draft's device being past the payload, {how}: {in_step} us"
    )
    yield (
        f"latency from the call of push, {size}: to the draft's device being past the payload, its host "
        f"waiting since {1e3 * WAITED_S:g} ms: {from_call} us"
    )
    yield from judge(rows, in_step, num_gpus)


def judge(rows: Sequence[TapRow], latency: Timing, num_gpus: int) -> Iterator[str]:
    """Yield a line a goal and size; bandwidth and latency themselves are those of two GPUs."""
    size = BANDWIDTH_FROM_MIB if num_gpus > 1 else ONE_GPU_FROM_MIB
    for row in rows:
        payload, speed = row.payload_mib, row.channel.median
        yield OF_RAW.judge_from(size, payload, 100 * speed / row.raw.median)
        if num_gpus > 1:
            yield BANDWIDTH.judge_from(size, payload, speed)
        else:  # between GPUs no copy is 20 times as fast as one through the host
            yield OF_STAGING.judge_from(size, payload, speed / row.staged.median)
    if num_gpus > 1:
        yield LATENCY.judge("median", latency.median)
    else:
        yield f"not judged, as there is one GPU: {BANDWIDTH}; {LATENCY}"


def _measure_taps(rank: int, sizes_mib: Sequence[int], repeats: int) -> Iterator[TapRow | Timing]:
    device = torch.device("cuda", torch.cuda.current_device())
    pair = Pair(rank, CudaEngine(device), device)
    yield from measure_pair(pair, sizes_mib, repeats)
    pair.control.close()


def measure_pair(pair: Pair, sizes_mib: Sequence[int], repeats: int) -> Iterator[TapRow | Timing]:
    """Measure every size, then `measure_latency`'s two; the same on both ranks."""
    for size in sizes_mib:
        yield TapRow(
            size,
            _raw(pair, size * MIB, repeats),
            _channel(pair, size * MIB, repeats),
            _staged(pair, size * MIB, repeats),
        )
    yield from measure_latency(pair, LATENCY_BYTES, max(20, 4 * repeats))


def _raw(pair: Pair, num_bytes: int, repeats: int) -> Timing:
    """GB/s of copies by rank 0 into an allocation of rank 1."""
    engine, count = pair.engine, _count(num_bytes)
    own = engine.allocate(num_bytes) if pair.rank else 0
    handles = pair.meet(engine.export(own).hex() if pair.rank else None)
    peer = 0 if pair.rank else engine.map(bytes.fromhex(handles[1]))
    source, lane = pair.payload(num_bytes), engine.new_lane()

    def body() -> None:
        for _ in range(count):
            lane.copy(peer, source.data_ptr(), num_bytes)

    speeds = _speeds(pair, count * num_bytes, repeats, None if pair.rank else body)
    if peer:
        engine.unmap(peer)
    pair.meet()
    if own:
        engine.free(own)
    return speeds


def _channel(pair: Pair, num_bytes: int, repeats: int) -> Timing:
    """GB/s of taps that are pulled and released in place."""
    channels, count = pair.channels(num_bytes), _count(num_bytes)
    values = pair.taps(num_bytes)
    like = [x.to("meta") for x in values]
    step = 0

    def begin() -> None:
        nonlocal step
        step += 1
        channels.begin_step(step, [rows_of(num_bytes)] * count)

    def push() -> None:
        for micro_batch in range(count):
            channels.push(0, micro_batch, values)

    def pull() -> None:
        for micro_batch in range(count):
            channels.pull(0, micro_batch, like)
            channels.release(micro_batch)

    counted = (count - DEPTH) * num_bytes
    speeds = _speeds(pair, counted, repeats, pull if pair.rank else push, begin)
    channels.close()
    return speeds


def _staged(pair: Pair, num_bytes: int, repeats: int) -> Timing:
    """GB/s of a copy to pinned memory and back to the device, by rank 0 alone."""
    source, count = pair.payload(num_bytes), max(1, STAGED_BYTES // num_bytes)
    target, host = torch.empty_like(source), torch.empty_like(source, device="cpu")
    host = host.pin_memory() if pair.device.type == "cuda" else host

    def body() -> None:
        for _ in range(count):
            host.copy_(source, non_blocking=True)
            target.copy_(host, non_blocking=True)

    return _speeds(pair, count * num_bytes, repeats, None if pair.rank else body)


def _speeds(
    pair: Pair, num_bytes: int, repeats: int, body: Callable[[], None] | None,
    begin: Callable[[], None] = lambda: None,
) -> Timing:  # fmt: skip
    """GB/s of ``num_bytes`` between the later start and the later end of all ranks with a ``body``."""
    samples = []
    for _ in range(repeats + WARMUP):
        begin()
        pair.meet()
        times = None
        if body is not None:
            start = time.perf_counter()
            body()
            pair.engine.synchronize()
            times = start, time.perf_counter()
        starts, ends = zip(*filter(None, pair.meet(times)), strict=True)
        samples.append(num_bytes / (max(ends) - max(starts)) / 1e9)
    return Timing.of(samples[WARMUP:])


def _count(num_bytes: int) -> int:
    return max(PAYLOADS_A_SAMPLE, BYTES_A_SAMPLE // num_bytes)

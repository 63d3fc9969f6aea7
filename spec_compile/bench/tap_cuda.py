"""Taps between two processes over CUDA IPC: bandwidth and latency.

Both processes use one GPU where there is one, else a GPU each. Every figure stands beside a raw
device copy into memory of the other process and beside staging through pinned host memory, made in
the same run by the same processes. The reader computes nothing: where it shares the writer's GPU,
the turns that its own work would take are in no figure of this table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.cuda_driver import CudaEngine
from spec_compile.runtime.processes import join
from spec_compile.runtime.tap_slot import TapSpec
from spec_compile.runtime.taps import TapChannels

from .goals import BANDWIDTH, BANDWIDTH_FROM_MIB, LATENCY, OF_RAW, OF_STAGING, ONE_GPU_FROM_MIB
from .timing import Timing
from .two_processes import spawn

WAIT_S = 60.0
DEPTH = 4
"""Slots of the channel."""
BYTES_A_SAMPLE = 1 << 33
"""So many that the first push and the last poll of a sample, which nothing overlaps, weigh little."""
WARMUP = 2
"""Samples that do not count: the first ones map memory and load kernels."""
MIB = 1 << 20
LATENCY_BYTES = 4 * MIB
WAITED_S = 2e-4
"""How long the reader waits before a push whose latency is measured."""
WIDTH = 4096
"""Elements a row, bfloat16."""


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
    yield TapRow.HEADER
    rows, latency = spawn(_measure_taps, tuple(sizes_mib), repeats)[1]
    yield from map(str, rows)
    yield (
        f"{LATENCY_BYTES / MIB:.0f} MiB, from push to its use allowed, by a reader that waits since "
        f"{1e3 * WAITED_S:g} ms: {latency} us"
    )
    yield from judge(rows, latency, torch.cuda.device_count())


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
        yield f"not measured, as there is one GPU: {BANDWIDTH}; {LATENCY}"


def _measure_taps(rank: int, sizes_mib: Sequence[int], repeats: int) -> tuple[list[TapRow], Timing]:
    pair = _Pair(rank)
    rows = [
        TapRow(
            size,
            pair.raw(size * MIB, repeats),
            pair.channel(size * MIB, repeats),
            pair.staged(size * MIB, repeats),
        )
        for size in sizes_mib
    ]
    latency = pair.latency(max(20, 4 * repeats))
    pair.control.close()
    return rows, latency


class _Pair:
    """Rank 0 pushes, rank 1 pulls."""

    def __init__(self, rank: int) -> None:
        control = join(2, timeout_s=WAIT_S)
        assert isinstance(control, SocketControl)
        self.rank, self.control = rank, control
        self.device = torch.device("cuda", torch.cuda.current_device())

    def meet(self, value: Any = None) -> list[Any]:
        """Wait for the other rank, with this rank's device idle."""
        torch.cuda.synchronize()
        return self.control.all_gather(value, deadline_s=WAIT_S)

    def raw(self, num_bytes: int, repeats: int) -> Timing:
        """GB/s of copies by rank 0 into an allocation of rank 1."""
        engine = CudaEngine(self.device)
        own = engine.allocate(num_bytes) if self.rank else 0
        handles = self.meet(engine.export(own).hex() if self.rank else None)
        peer = 0 if self.rank else engine.map(bytes.fromhex(handles[1]))
        source, lane = _payload(num_bytes, self.device), engine.new_lane()

        def body() -> None:
            for _ in range(_count(num_bytes)):
                lane.copy(peer, source.data_ptr(), num_bytes)

        speeds = self._speeds(num_bytes, repeats, body if not self.rank else None, None)
        if peer:
            engine.unmap(peer)
        self.meet()
        if own:
            engine.free(own)
        return speeds

    def channel(self, num_bytes: int, repeats: int) -> Timing:
        """GB/s of taps that are pulled and released in place."""
        channels, rows = self._channels(num_bytes), num_bytes // (2 * WIDTH)
        values = [_payload(num_bytes, self.device).view(torch.bfloat16).view(rows, WIDTH)]
        like = [x.to("meta") for x in values]
        step = [0]

        def begin() -> None:
            step[0] += 1
            channels.begin_step(step[0], [rows] * _count(num_bytes))

        def push() -> None:
            for micro_batch in range(_count(num_bytes)):
                channels.push(0, micro_batch, values)

        def pull() -> None:
            for micro_batch in range(_count(num_bytes)):
                channels.pull(0, micro_batch, like)
                channels.release(micro_batch)

        speeds = self._speeds(num_bytes, repeats, pull if self.rank else push, begin)
        channels.close()
        return speeds

    def staged(self, num_bytes: int, repeats: int) -> Timing:
        """GB/s of a copy to pinned memory and back to the device, by rank 0 alone."""
        source = _payload(num_bytes, self.device)
        target, host = torch.empty_like(source), torch.empty_like(source, device="cpu").pin_memory()

        def body() -> None:
            for _ in range(max(1, _count(num_bytes) // 16)):
                host.copy_(source, non_blocking=True)
                target.copy_(host, non_blocking=True)

        share = max(1, _count(num_bytes) // 16) / _count(num_bytes)
        found = self._speeds(num_bytes, repeats, body if not self.rank else None, None)
        return Timing(*(share * x for x in (found.median, found.low, found.high)))

    def latency(self, repeats: int) -> Timing:
        """Microseconds from the call of push to the reader's device being past the payload."""
        channels, rows = self._channels(LATENCY_BYTES), LATENCY_BYTES // (2 * WIDTH)
        values = [_payload(LATENCY_BYTES, self.device).view(torch.bfloat16).view(rows, WIDTH)]
        channels.begin_step(1, [rows] * repeats)
        samples = []
        for micro_batch in range(repeats):
            self.meet()
            if self.rank:
                channels.pull(0, micro_batch, values)
                torch.cuda.synchronize()
                at = time.perf_counter()
                channels.release(micro_batch)
            else:
                time.sleep(WAITED_S)
                at = time.perf_counter()
                channels.push(0, micro_batch, values)
            begun, seen = self.meet(at)
            samples.append((seen - begun) * 1e6)
        channels.close()
        return Timing.of(samples[repeats // 4 :])

    def _speeds(
        self, num_bytes: int, repeats: int, body: Callable[[], None] | None,
        begin: Callable[[], None] | None,
    ) -> Timing:  # fmt: skip
        """GB/s over the longer of both ranks' times; the first `WARMUP` runs do not count."""
        samples = []
        for _ in range(repeats + WARMUP):
            if begin is not None:
                begin()
            self.meet()
            start = time.perf_counter()
            if body is not None:
                body()
                torch.cuda.synchronize()
            seconds = max(self.meet(time.perf_counter() - start))
            samples.append(_count(num_bytes) * num_bytes / seconds / 1e9)
        return Timing.of(samples[WARMUP:])

    def _channels(self, num_bytes: int) -> TapChannels:
        return TapChannels.connect(
            self.control, [TapSpec(0, (WIDTH,), (torch.bfloat16,), "bench")], lane="dp0 cp0",
            stages=(self.rank,), num_stages=2, depths={0: DEPTH},
            capacity_rows=num_bytes // (2 * WIDTH), transport="cuda_ipc", timeout_s=WAIT_S,
            device=self.device,
        )  # fmt: skip


def _count(num_bytes: int) -> int:
    return max(8, BYTES_A_SAMPLE // num_bytes)


def _payload(num_bytes: int, device: torch.device) -> Tensor:
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)

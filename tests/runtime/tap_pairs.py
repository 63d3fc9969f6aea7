"""Both ends of one tap channel on two threads, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_compile.plan import Plan
from spec_compile.runtime.taps import TapChannels, TapSpec
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads

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


def segments_of(pid: int) -> list[Path]:
    """Names that a process has left in shared memory."""
    return list(Path("/dev/shm").glob(f"spec_compile_{pid}_*"))

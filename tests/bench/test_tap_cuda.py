"""What is measured of taps over CUDA IPC, in processes, over a device made of host memory."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch

from spec_compile.bench import tap_cuda
from spec_compile.bench.tap_pair import DEPTH, Pair
from spec_compile.runtime import tap_setup
from spec_compile.runtime.cuda_ipc_taps import CudaIpcTaps
from tests.ranks import run_processes
from tests.runtime.plain_engine import PlainEngine, PlainLane

COPY_S = 0.004


class LatePair(Pair):
    """Its reader leaves every barrier when the writer has filled the ring."""

    def meet(self, value: Any = None) -> list[Any]:
        values = super().meet(value)
        time.sleep(2 * DEPTH * COPY_S * self.rank)
        return values


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("shared", [False, True])
def test_no_tap_is_measured_to_be_faster_than_the_copy_in_it(shared: bool) -> None:
    """So few payloads a sample that the head start of the writer would be half of the figure."""

    def body(rank: int) -> Any:
        engine = PlainEngine(delay_s=COPY_S, shared=shared, current=PlainLane())
        with (
            mock.patch.object(tap_setup, "choose", return_value="cuda_ipc"),
            mock.patch.object(tap_setup, "open_transport", lambda _, s: CudaIpcTaps(s, engine)),
            mock.patch.object(engine, "synchronize", engine.finish),
            mock.patch.multiple(tap_cuda, PAYLOADS_A_SAMPLE=2 * DEPTH, BYTES_A_SAMPLE=1 << 20),
        ):
            pair = LatePair(rank, engine, torch.device("cpu"))
            found = list(tap_cuda.measure_pair(pair, [1], 2))
            pair.control.close()
        return found

    (row, *latencies), other = run_processes(2, body)
    assert other == [row, *latencies], "both ranks say the same"
    for speed in (row.raw, row.channel):
        assert 0 < speed.high < tap_cuda.MIB / COPY_S / 1e9
    for latency in latencies:
        assert COPY_S * 1e6 < latency.low < 1e6

"""The self-test of tap channels: GB/s of every edge, end to end, and a warning where a path is slow."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import torch
from torch import Tensor

from .tap_slot import TapSpec
from .taps import TapChannels

PROBE_STEP = -1
"""Step number in the headers of a self-test."""
PROBE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Size of one push, by type of device."""
PUSHES = 8
FLOORS: dict[tuple[str, str], tuple[float, str]] = {
    ("shm", "cpu"): (0.2, "the host is busy, or its memory is slow"),
    ("shm", "cuda"): (1e9, "taps are staged through host memory; use cuda_ipc"),
    ("nixl", "cpu"): (
        0.5,
        "UCX found no RDMA or shared memory; look at UCX_TLS and UCX_NET_DEVICES",
    ),
    ("nixl", "cuda"): (10.0, "UCX stages through the host; look at UCX_TLS and GPUDirect RDMA"),
    ("c10d", "cpu"): (0.1, "the network is slow; install the nixl extra"),
    ("c10d", "cuda"): (10.0, "the network is slow; install the nixl extra"),
    ("cuda_ipc", "cuda"): (  # processes that share one GPU take turns, and wait for them here
        50.0,
        "copies between GPUs should run at NVLink's speed; a handle may be open in the owner's context, "
        "or expandable segments are on",
    ),
}
"""By transport and type of device: GB/s below which a path is called slow, and what to do."""
log = logging.getLogger(__name__)


def measure(channels: TapChannels, num_pushes: int = PUSHES) -> dict[str, float]:
    """Time every edge of all pipelines, from credit to a copy out of the slot; the best push counts.

    All ranks take part, between two steps. Edges run one after the other, pipelines at once, through
    rings of one slot, so that nothing overlaps. The rings are as before afterwards.

    Returns:
        GB/s by `TapEdge.name`, the same on every rank.
    """
    control, device = channels.control, channels.device
    target = PROBE_BYTES.get(device.type, PROBE_BYTES["cpu"])
    widest = max((sum(spec.sizes(1)) for spec in channels.specs.values()), default=1)
    rows = max(2, target // widest)
    before = (channels.depths, channels.capacity_rows)
    channels.resize(dict.fromkeys(channels.depths, 1), rows)
    speeds: dict[str, float] = {}
    for source, spec in channels.specs.items():
        channels.begin_step(PROBE_STEP, [rows] * num_pushes)
        seconds = _best_push(channels, source, spec, rows, num_pushes)
        edge = channels.agreed.edges[source]
        if edge.reader == control.rank:
            speeds[edge.name] = sum(spec.sizes(rows)) / seconds / 1e9
    channels.resize(*before)
    told = control.all_gather(speeds, deadline_s=channels.timeout_s)
    return {name: speed for one in told for name, speed in one.items()}


def _best_push(
    channels: TapChannels, source: int, spec: TapSpec, rows: int, num_pushes: int
) -> float:
    """Push and pull on one edge; return the shortest time between two pushes, in seconds."""
    values, out = _zeros(spec, rows, channels.device), _zeros(spec, rows, channels.device)
    ends = []
    for micro_batch in range(num_pushes):
        if source in channels.rings.writers:
            channels.push(source, micro_batch, values)
        if source in channels.rings.readers:
            pulled = channels.pull(source, micro_batch, out)
            for place, value in zip(out, pulled, strict=True):
                place.copy_(value)
            _finish(channels.device)
            channels.release(micro_batch, [source])
        ends.append(time.perf_counter())
    return min(later - earlier for earlier, later in pairwise(ends))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _zeros(spec: TapSpec, rows: int, device: torch.device) -> list[Tensor]:
    pairs = zip(spec.widths, spec.dtypes, strict=True)
    return [torch.zeros(rows, width, dtype=dtype, device=device) for width, dtype in pairs]


def self_test(channels: TapChannels) -> dict[str, float]:
    """Measure all edges, log their speeds, and warn of slow ones; all ranks take part.

    Returns:
        GB/s by `TapEdge.name`; nothing where all stages are in one process.
    """
    transports = channels.agreed.transports
    if set(transports.values()) <= {"loopback"}:
        return {}
    speeds = measure(channels)
    if channels.control.rank == 0:
        for name, speed in speeds.items():
            log.info("tap channel %s over %s: %.2f GB/s", name, transports[name], speed)
            floor, advice = FLOORS.get((transports[name], channels.device.type), (0.0, ""))
            if speed < floor:
                log.warning(
                    "tap channel %s over %s runs at %.2f GB/s: %s",
                    name,
                    transports[name],
                    speed,
                    advice,
                )
    return speeds

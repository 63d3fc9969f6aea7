"""Threads for operations on the CPU, of all ranks of a host, against the cores that they may use.

A step's work on the host is many short operations, and each waits until all its threads had a core: two ranks
with 16 threads each on 16 cores took up to 1.5 times as long a step as with one each.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux tells a container its microseconds of CPU time a period, or "max", and the period."""


def own_threads() -> dict[str, Any]:
    """This process's threads, a mask of the cores that it may use, and how many at a time, 0 for all."""
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    mask = hex(sum(1 << core for core in cores))
    return {"threads": torch.get_num_threads(), "cores": mask, "at_a_time": _at_a_time()}


def crowded(rank: int, entries: Sequence[dict[str, Any]]) -> str | None:
    """Say on a host's first rank that its ranks have more threads than cores; None where all is well.

    Args:
        rank: this one.
        entries: the host and `own_threads` of every rank.
    """
    here = [r for r, entry in enumerate(entries) if entry["host"] == entries[rank]["host"]]
    own = [entries[r] for r in here]
    threads = [int(entry["threads"]) for entry in own]
    union = functools.reduce(operator.or_, (int(entry["cores"], 16) for entry in own))
    cores = min([union.bit_count(), *(entry["at_a_time"] for entry in own if entry["at_a_time"])])
    if rank != here[0] or max(threads) == 1 or sum(threads) <= cores:
        return None
    fits = max(1, cores // len(here))
    return (
        f"the {len(here)} ranks of this host have {sum(threads)} threads for operations on the CPU, on {cores} "
        "cores, and may wait for each other for a large part of a step; set OMP_NUM_THREADS="
        f"{fits}{', or 1' if fits > 1 else ','} as torchrun does"
    )


def _at_a_time() -> int:
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return 0 if quota == "max" else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return 0

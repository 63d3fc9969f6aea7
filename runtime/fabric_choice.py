"""Which fabric serves the groups of a world: by where its ranks run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec_compile.errors import PlanError
from spec_compile.plan import Plan

from .control import SocketControl
from .world import group_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """Where one rank runs."""

    host: str
    device: str
    """Its type, with the identity of the GPU."""


def choose_fabrics(
    control: SocketControl, plan: Plan, device: torch.device, host: str
) -> dict[str, str]:
    """Name the fabric of every group: "gloo", "cuda_ipc" or "nccl"; the same on all ranks.

    Args:
        control: between all ranks; each of them calls it.
        plan: gives the groups.
        device: of this rank.
        host: identity of this rank's host.

    Raises:
        PlanError: ranks run on devices of different types, or several on one GPU of different hosts'
            groups, which nothing can serve.
    """
    identity = device.type
    if device.type == "cuda":
        identity += f" {torch.cuda.get_device_properties(device).uuid}"
    replies = control.all_gather([host, identity], deadline_s=plan.timeout_s)
    seats = [Seat(str(h), str(d)) for h, d in replies]
    chosen = {
        name: _choose(name, [[seats[rank] for rank in ranks] for ranks in groups])
        for name, groups in group_ranks(plan).items()
        if len(groups[0]) > 1
    }
    log.info("spec_compile: fabrics %s", chosen)
    return chosen


def _choose(name: str, groups: Sequence[Sequence[Seat]]) -> str:
    kinds = {seat.device.split()[0] for group in groups for seat in group}
    if len(kinds) > 1:
        raise PlanError(f"all ranks need devices of one type, found {sorted(kinds)}")
    if kinds == {"cpu"}:
        return "gloo"
    if kinds != {"cuda"}:
        raise PlanError(f"several ranks need devices of type cpu or cuda, found {sorted(kinds)}")
    if all(len({seat.host for seat in group}) == 1 for group in groups):
        return "cuda_ipc"
    if any(len({(seat.host, seat.device) for seat in group}) < len(group) for group in groups):
        raise PlanError(
            f"group {name!r} spans hosts and has several ranks on one GPU, which NCCL refuses; give "
            "every rank a GPU of its own, or keep the group on one host"
        )
    return "nccl"

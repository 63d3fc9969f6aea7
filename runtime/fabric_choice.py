"""Which fabric serves the groups of a world: by where its ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec_compile.errors import PlanError
from spec_compile.plan import Plan

from .control import SocketControl
from .world import group_ranks


@dataclass(frozen=True)
class Seat:
    """Where one rank runs."""

    host: str
    kind: str
    """Type of its device."""
    gpu: str = ""
    """Identity of its GPU."""


def gather_seats(
    control: SocketControl, device: torch.device, host: str, deadline_s: float
) -> list[Seat]:
    """Tell all ranks where this one runs; returns all seats, by rank."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    replies = control.all_gather([host, device.type, gpu], deadline_s=deadline_s)
    return [Seat(*map(str, reply)) for reply in replies]


def choose_fabrics(plan: Plan, seats: Sequence[Seat], *, shares: bool = True) -> dict[str, str]:
    """Name the fabric of every group of several ranks: "gloo", "cuda_ipc" or "nccl".

    Args:
        plan: gives the groups.
        seats: of all ranks.
        shares: whether processes of one host can map each other's GPU memory.

    Raises:
        PlanError: ranks run on devices of different types, or no fabric can serve a group.
    """
    kinds = {seat.kind for seat in seats}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise PlanError(
            f"several ranks need devices of one type, cpu or cuda, found {sorted(kinds)}; move the "
            "target to the same type of device on every rank"
        )
    return {
        name: "gloo"
        if kinds == {"cpu"}
        else _on_gpus(name, [[seats[rank] for rank in ranks] for ranks in groups], shares)
        for name, groups in group_ranks(plan).items()
        if len(groups[0]) > 1
    }


def _on_gpus(name: str, groups: Sequence[Sequence[Seat]], shares: bool) -> str:
    if shares and all(len({seat.host for seat in group}) == 1 for group in groups):
        return "cuda_ipc"
    if any(len({(seat.host, seat.gpu) for seat in group}) < len(group) for group in groups):
        reason = "spans hosts" if shares else "cannot share GPU memory"
        raise PlanError(
            f"group {name!r} {reason} and has several ranks on one GPU, which NCCL refuses; give "
            "every rank a GPU of its own (torch.cuda.set_device(LOCAL_RANK))"
        )
    return "nccl"

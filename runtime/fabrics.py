"""Make a rank's fabrics: gloo for CPU tensors; CUDA IPC inside a host, NCCL across hosts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from spec_compile.errors import ChannelError
from spec_compile.plan import Plan

from . import cuda_ipc
from .collectives import PairwiseFabric
from .control import SocketControl
from .cuda_driver import CudaEngine
from .fabric_choice import choose_fabrics, gather_seats
from .gloo import GlooFabric
from .nccl import NcclFabric, nccl_groups
from .solo import SoloControl, SoloFabric
from .world import group_ranks, own_groups

log = logging.getLogger(__name__)


def build_fabrics(
    control: SoloControl | SocketControl, plan: Plan, device: torch.device, host: str = ""
) -> dict[str, PairwiseFabric]:
    """Make this rank's fabrics; every rank of the world calls it with the same plan.

    Args:
        control: between all ranks.
        plan: gives the groups and the deadline.
        device: of the tensors.
        host: identity of this rank's host.

    Raises:
        PlanError: no fabric can serve a group, such as several ranks on one GPU without CUDA IPC.
        ChannelError: a rank did not take part in time.
    """
    if isinstance(control, SoloControl):
        return {
            name: SoloFabric(name, device, control.latch) for name in own_groups(plan, control.rank)
        }
    seats = gather_seats(control, device, host, plan.timeout_s)
    chosen = choose_fabrics(plan, seats)
    log.info("spec_compile: fabrics %s", chosen)
    try:
        return build_chosen(control, plan, device, chosen)
    except cuda_ipc.CannotShareError as error:  # on all ranks
        chosen = choose_fabrics(plan, seats, shares=False)
        log.warning("spec_compile: %s; fabrics %s instead", error, chosen)
        return build_chosen(control, plan, device, chosen)


def build_chosen(
    control: SocketControl, plan: Plan, device: torch.device, chosen: Mapping[str, str]
) -> dict[str, PairwiseFabric]:
    """Make the fabrics that `choose_fabrics` named, or a benchmark."""
    own = own_groups(plan, control.rank)
    fabrics: dict[str, PairwiseFabric] = {
        name: SoloFabric(name, device, control.latch)
        for name, ranks in own.items()
        if len(ranks) == 1
    }
    shared = {name: ranks for name, ranks in own.items() if chosen.get(name) == "cuda_ipc"}
    if "cuda_ipc" in chosen.values():
        engine = CudaEngine(device)
        fabrics |= cuda_ipc.connect(control, shared, engine, device, plan.timeout_s)
    for name, groups in group_ranks(plan).items():
        for ranks in groups if chosen.get(name) in ("gloo", "nccl") else ():
            # c10d wants every rank in every new_group call, in one order, members or not
            made = _c10d_fabric(name, ranks, control, plan, device, chosen[name])
            if made is not None:
                fabrics[name] = made
    return fabrics


def _c10d_fabric(
    name: str,
    ranks: list[int],
    control: SocketControl,
    plan: Plan,
    device: torch.device,
    backend: str,
) -> PairwiseFabric | None:
    timeout = timedelta(seconds=plan.timeout_s)
    try:
        if backend == "nccl":
            groups = nccl_groups(ranks, timeout, device)
        else:
            groups = [dist.new_group(ranks, timeout=timeout, backend="gloo")]
    except RuntimeError as error:
        raise ChannelError(f"could not make a group of ranks {ranks}: {error}") from error
    if control.rank not in ranks:
        return None
    if backend == "nccl":
        return NcclFabric(
            name, groups, control, device=device, timeout_s=plan.timeout_s, messages=name != "grads"
        )
    return GlooFabric(name, groups[0], control, device=device, timeout_s=plan.timeout_s)

"""The world of processes: rendezvous over torch.distributed, then own connections and groups."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spec_compile.errors import ChannelError, ConfigError, PlanError
from spec_compile.plan import Plan

from .control import SocketControl
from .fabrics import build_fabrics
from .host_threads import crowded, own_threads
from .mesh import connect_mesh, listen
from .solo import SoloControl
from .world import World, coordinates

__all__ = ["build_fabrics", "join", "open_world"]

T = TypeVar("T")
INTRODUCTION_BYTES = 1 << 12
"""Of a rank's entry, padded: a mask of 8192 cores takes half of it."""
LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)


def join(
    world_size: int, *, timeout_s: float = 120.0, deadline_s: float = 3600.0
) -> SoloControl | SocketControl:
    """Meet all ranks and return the control plane between them.

    Initialises torch.distributed from the environment when nobody has and ``world_size`` or the
    launcher asks for several ranks. All ranks call it the same number of times in the same order.
    The caller compares the result's ``size`` with what it expected.

    Args:
        world_size: ranks that this rank's plan needs.
        timeout_s: silence after which a peer counts as stopped, and deadline of the connections.
        deadline_s: how long the slowest rank may take to come here.

    Raises:
        PlanError: several ranks are needed but this process was not launched as one of them.
        ChannelError: a rank did not come or could not be reached.
    """
    if not _initialised(world_size, deadline_s):
        return SoloControl()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return SoloControl()
    return _c10d("join the other ranks", lambda: _meet(rank, size, timeout_s, deadline_s))


def open_world(control: SoloControl | SocketControl, plan: Plan, device: torch.device) -> World:
    """Build this rank's world from the control plane of `join`, whose size must be the plan's."""
    if control.size != plan.world_size:
        raise PlanError(
            f"the plan needs dp * cp * pp = {plan.world_size} ranks, found {control.size}; launch "
            "as many as the plan needs"
        )
    fabrics = build_fabrics(control, plan, device, _host())
    where = coordinates(plan, control.rank)
    return World(control.rank, control.size, device, control, where, fabrics)


def _initialised(world_size: int, deadline_s: float) -> bool:
    """Make sure that torch.distributed runs, unless one process alone was asked for."""
    if not dist.is_available():
        if world_size > 1:
            raise ConfigError("several ranks need a torch that is built with torch.distributed")
        return False
    if dist.is_initialized():
        return True
    if world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise PlanError(
            f"the plan needs {world_size} ranks, but the environment lacks {', '.join(missing)}; start with "
            f"torchrun --nproc-per-node {world_size}, or initialise torch.distributed first"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=deadline_s)
    _c10d("initialise torch.distributed", lambda: dist.init_process_group(backend, timeout=timeout))
    return True


def _meet(rank: int, size: int, timeout_s: float, deadline_s: float) -> SocketControl:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    assert group is not None, "a group of all ranks has this rank in it"
    try:
        own = {"host": _host(), "address": _own_address(), **own_threads()}
        hosts = _introduce(own, size, group)
        if crowd := crowded(rank, hosts):
            log.warning("%s", crowd)
        one_host = len({entry["host"] for entry in hosts}) == 1
        listener = listen(LOOPBACK if one_host else hosts[rank]["address"], size)
        place = {"address": listener.getsockname()[:2], "token": secrets.token_hex(16)}
        places = _introduce(place, size, group)
    finally:
        dist.destroy_process_group(group)
    addresses = [(str(host), int(port)) for host, port in (p["address"] for p in places)]
    sockets = connect_mesh(rank, addresses, listener, str(places[0]["token"]), timeout_s)
    return SocketControl(rank, size, sockets, timeout_s=timeout_s)


def _introduce(entry: dict[str, Any], size: int, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Give all ranks the small entries of all ranks, before there is a control plane."""
    text = json.dumps(entry).encode().ljust(INTRODUCTION_BYTES)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(bytes(other.tolist())) for other in everyone]


def _host() -> str:
    """Tell hosts apart; containers of one machine share its boot id but not their name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text(encoding="ascii") if boot.exists() else "")


def _own_address() -> str:
    """Give the address of the interface that reaches the master."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; only chooses the route
            return str(probe.getsockname()[0])
    except OSError:  # no route or name: enough on one host, refused by connect_mesh otherwise
        return LOOPBACK


def _c10d(what: str, call: Callable[[], T]) -> T:
    """Call into c10d; its errors surface as ChannelError."""
    try:
        return call()
    except RuntimeError as error:
        raise ChannelError(f"could not {what}: {error}") from error

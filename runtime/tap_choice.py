"""Which transport an edge takes: by what its two ends have told about themselves."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spec_compile.errors import ConfigError

from .nixl_taps import PACKAGE as NIXL_PACKAGE

_PROCESS = secrets.token_hex(8)
_NEEDS = {
    "nixl": f"the package {NIXL_PACKAGE} (spec-compile[nixl])",
    "c10d": "ranks in several processes that torch.distributed joins (torchrun)",
    "cuda_ipc": "CUDA devices",
}


@dataclass(frozen=True)
class Hello:
    """What a rank tells all others before channels are made."""

    lane: str
    stages: tuple[int, ...]
    specs: str
    """Digest of its tap list."""
    process: str
    host: str
    device: str
    """Type of its device."""
    has: tuple[str, ...]
    """Transports to other processes that could work here."""

    def to_json(self) -> dict[str, Any]:
        """For the control plane."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hello:
        """Read what another rank told."""
        lists = {name: tuple(data[name]) for name in ("stages", "has")}
        return cls(**{**data, **lists})


def own_hello(lane: str, stages: tuple[int, ...], specs: str, device: torch.device) -> Hello:
    """Describe this rank."""
    # The pid tells forked processes apart, the token processes of different pid namespaces.
    process = f"{os.getpid()} {_PROCESS}"
    return Hello(lane, stages, specs, process, _host(), device.type, _available(device))


def choose(writer: Hello, reader: Hello, asked: str) -> str:
    """Choose the transport of an edge; stages of one process always take loopback under ``auto``.

    Args:
        writer: What the source's rank told.
        reader: What the draft's rank told.
        asked: `Plan.tap_transport`. Stages of one *rank* have nothing to transport, whatever it says.

    Raises:
        ConfigError: an end lacks what the transport needs; the same on every rank.
    """
    if asked != "auto":
        return "loopback" if writer == reader else _checked(writer, reader, asked)
    if writer.process == reader.process:
        return "loopback"
    able = [name for name in _order(writer, reader) if name in writer.has and name in reader.has]
    return able[0] if able else "shm"


def _checked(writer: Hello, reader: Hello, asked: str) -> str:
    for end in (writer, reader):
        if asked in _NEEDS and asked not in end.has:
            raise ConfigError(
                f"tap_transport={asked!r} needs {_NEEDS[asked]}, which the rank of stages "
                f"{list(end.stages)} ({end.lane}) lacks; use 'auto'"
            )
    return asked


def _order(writer: Hello, reader: Hello) -> tuple[str, ...]:
    if writer.host != reader.host:
        return ("nixl", "c10d")
    if writer.device == reader.device == "cuda":
        return ("cuda_ipc", "nixl", "shm")
    return ("shm",)


def _available(device: torch.device) -> tuple[str, ...]:
    found = ["shm"]
    if device.type == "cuda":
        found.append("cuda_ipc")
    if importlib.util.find_spec(NIXL_PACKAGE) is not None:
        found.append("nixl")
    if dist.is_available() and dist.is_initialized():
        found.append("c10d")
    return tuple(found)


def _host() -> str:
    """Tell hosts apart: by name, boot, and by which /dev/shm they see."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    shm = Path("/dev/shm")
    seen = shm.stat().st_dev if shm.exists() else 0
    return f"{socket.gethostname()} {text} {seen}"

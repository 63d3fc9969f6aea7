"""What a process holds: handles, threads, mappings and memory, to see that steps leave them flat."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch


def footprint() -> tuple[int, int, int]:
    """Open handles, threads and mapped segments of this process."""
    own = Path("/proc/self")
    maps = (own / "maps").read_text(encoding="ascii")
    return (
        len(list((own / "fd").iterdir())),
        len(list((own / "task").iterdir())),
        maps.count("/spec_compile"),
    )


def resident_kib() -> int:
    """Resident memory of this process, shared pages included."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def device_kib() -> int:
    """Memory of this process' GPU that is in use, by whomever; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) // 1024


@dataclass
class Samples:
    """A footprint every so many steps."""

    held: set[tuple[int, int, int]] = field(default_factory=set)
    host: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)

    def take(self) -> None:
        """Look once."""
        self.held.add(footprint())
        self.host.append(resident_kib())
        self.device.append(device_kib())

    def check(self, *, warm: int, host_kib: int = 4096, device_kib: int = 4096) -> None:
        """Handles never changed, and memory has not grown since sample ``warm`` by more than a little."""
        assert len(self.held) == 1, self.held
        for name, seen, most in (
            ("host", self.host, host_kib),
            ("device", self.device, device_kib),
        ):
            assert seen[-1] - seen[warm] < most, f"{name} memory in KiB: {seen}"

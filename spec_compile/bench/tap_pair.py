"""Two processes with a tap channel over CUDA IPC between their devices, ready to be timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.copy_engine import Engine
from spec_compile.runtime.processes import join
from spec_compile.runtime.tap_slot import TapSpec
from spec_compile.runtime.taps import TapChannels

WAIT_S = 60.0
DEPTH = 4
"""Slots of the channel."""
WIDTH = 4096
"""Elements a row, bfloat16."""


class Pair:
    """One of both processes: rank 0 pushes, rank 1 pulls.

    Args:
        rank: 0 or 1.
        engine: of this process's device.
        device: where payloads live.
    """

    def __init__(self, rank: int, engine: Engine, device: torch.device) -> None:
        control = join(2, timeout_s=WAIT_S)
        assert isinstance(control, SocketControl)
        self.rank, self.control, self.engine, self.device = rank, control, engine, device

    def meet(self, value: Any = None) -> list[Any]:
        """Exchange values with the other rank, both devices idle."""
        self.engine.synchronize()
        return self.tell(value)

    def tell(self, value: Any = None) -> list[Any]:
        """Exchange values with the other rank, whatever the devices do."""
        return self.control.all_gather(value, deadline_s=WAIT_S)

    def channels(self, num_bytes: int) -> TapChannels:
        """Connect for payloads of ``num_bytes``; to be closed."""
        return TapChannels.connect(
            self.control, [TapSpec(0, (WIDTH,), (torch.bfloat16,), "bench")], lane="dp0 cp0",
            stages=(self.rank,), num_stages=2, depths={0: DEPTH},
            capacity_rows=rows_of(num_bytes), transport="cuda_ipc", timeout_s=WAIT_S,
            device=self.device,
        )  # fmt: skip

    def payload(self, num_bytes: int) -> Tensor:
        """Random bytes, uint8 [num_bytes]."""
        return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=self.device)

    def taps(self, num_bytes: int) -> list[Tensor]:
        """The same as one value of a tap, bfloat16 [rows, WIDTH]."""
        return [self.payload(num_bytes).view(torch.bfloat16).view(rows_of(num_bytes), WIDTH)]


def rows_of(num_bytes: int) -> int:
    """Rows of a payload."""
    return num_bytes // (2 * WIDTH)

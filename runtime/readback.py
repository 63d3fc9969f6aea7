"""Numbers on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Readback:
    """Values that travel in the stream's order; who reads them waits for them, not for what was queued later.

    Args:
        values: of any shape; integers and floats become float64.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._shapes = [x.shape for x in values]
        self._flat = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._arrived: torch.cuda.Event | None = None
        if not values:
            return
        device = next((x.device for x in values if x.device.type != "cpu"), torch.device("cpu"))
        flat = [x.detach().to(device, torch.float64).reshape(-1) for x in values]
        self._flat = torch.cat(flat)
        if device.type == "cuda":
            there = self._flat
            self._flat = torch.empty(there.shape, dtype=there.dtype, device="cpu", pin_memory=True)
            self._flat.copy_(there, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def numbers(self) -> list[Any]:
        """A float a scalar, nested lists of floats otherwise."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [x.reshape(shape).tolist() for x, shape in zip(parts, self._shapes, strict=True)]

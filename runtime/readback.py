"""Numbers on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Readback:
    """Values that travel in the stream's order; who reads them waits for them, not for what was queued later.

    Values that are on the host already stay there: to send them to the device would wait for it.

    Args:
        values: of any shape; integers and floats become float64.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._shapes = [x.shape for x in values]
        there = [x.detach() for x in values if x.is_cuda]
        self._here = [None if x.is_cuda else _copied(x) for x in values]
        self._flat = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._arrived: torch.cuda.Event | None = None
        if there:
            device = there[0].device
            flat = torch.cat([x.to(device, torch.float64).reshape(-1) for x in there])
            self._flat = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._flat.copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def numbers(self) -> list[Any]:
        """A float a scalar, nested lists of floats otherwise."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found, at = [], 0
        for x, shape in zip(self._here, self._shapes, strict=True):
            if x is None:
                x = self._flat[at : at + shape.numel()].reshape(shape)
                at += shape.numel()
            found.append(x.tolist())
        return found


def _copied(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64, copy=True)

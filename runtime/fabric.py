"""Communication as the runtime sees it: groups of ranks that move tensors, and a control plane that reports failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Control(Protocol):
    """Small messages between all ranks: agreement at the entry of a step, heartbeats, and the failure word."""

    rank: int
    size: int

    def all_gather(self, payload: Any, *, deadline_s: float) -> list[Any]:
        """Give every rank the list of all ranks' JSON-able payloads, in rank order.

        A living peer may take ``deadline_s``; a peer without a heartbeat for ``timeout_s``, or one that died,
        ends the wait at once with a ChannelError that names it.
        """

    def fail(self, error: BaseException) -> None:
        """Publish the failure word: every rank's pending and later waits raise it. Never blocks or raises."""

    def check(self) -> None:
        """Raise the failure that a peer published or that was detected (dead or silent peer), if any."""

    def close(self) -> None:
        """Leave; idempotent. A closed peer is not a dead peer."""


class Fabric(Protocol):
    """One group of ranks. Every wait has a deadline and ends early, in a ChannelError, when `Control.check` raises."""

    name: str
    rank: int
    """This rank's index inside the group."""
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], the same on every rank; equal shapes on all ranks."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]: the sum over ranks of their ``x[rank]``; deterministic order."""

    def all_reduce_(self, x: Tensor) -> None:
        """Sum over ranks, in place; bitwise the same on every rank, deterministic order."""

    def shift(self, tensors: Sequence[Tensor], offset: int = 1) -> list[Tensor]:
        """Send to ``rank + offset``, receive from ``rank - offset`` (mod size), same shapes and dtypes."""

    def exchange(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor]:
        """All to all: ``send[r]`` goes to rank r; returns what each rank sent here, of shape ``shapes[r]``."""

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Start sending to group rank ``dst`` and return at once; the fabric keeps ``x`` alive until `flush`."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0) -> Tensor:
        """Wait for the tensor that group rank ``src`` sent with ``tag``."""

    def flush(self) -> None:
        """Wait until everything sent has been taken."""

"""The world of one process alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ChannelError, InvariantError
from spec_compile.plan import Plan

from .collectives import Message, PairwiseFabric
from .failure import FailureLatch, FailureWord
from .mesh import to_json
from .world import World, coordinates, own_groups


class SoloControl:
    """A `Control` without peers."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.latch = FailureLatch()
        self._closed = False

    def all_gather(self, payload: Any, *, deadline_s: float) -> list[Any]:
        """Return the payload as it would have travelled, alone in a list."""
        self.check()
        if self._closed:
            raise ChannelError("the control plane was closed; build a new model to go on")
        return [json.loads(to_json(payload))]

    def fail(self, error: BaseException) -> None:
        """Let later waits raise ``error``."""
        self.latch.set(FailureWord.of(error, self.rank))

    def check(self) -> None:
        """Raise the failure, if any."""
        self.latch.check()

    def close(self) -> None:
        """Leave; idempotent."""
        self._closed = True


class SoloFabric(PairwiseFabric):
    """A group of one rank, in a world of any size."""

    def __init__(self, name: str, device: torch.device, latch: FailureLatch) -> None:
        super().__init__(name, 0, 1, device, latch)

    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        raise self._no_peer(next(peer for peer, _ in (*sends, *receives)))

    def _post(self, x: Tensor, dst: int, lane: int) -> None:
        raise self._no_peer(dst)

    def _take(self, out: Tensor, src: int, lane: int) -> None:
        raise self._no_peer(src)

    def _drain(self) -> None:
        return

    def _no_peer(self, peer: int) -> InvariantError:
        return InvariantError(f"fabric {self.name!r} has one rank, but rank {peer} was addressed")


def solo_world(plan: Plan, device: torch.device, control: SoloControl | None = None) -> World:
    """Build the world of a plan with one rank."""
    if plan.world_size != 1:
        raise InvariantError(f"a solo world needs a plan of 1 rank, found {plan.world_size}")
    control = control or SoloControl()
    fabrics = {name: SoloFabric(name, device, control.latch) for name in own_groups(plan, 0)}
    return World(0, 1, device, control, coordinates(plan, 0), fabrics)

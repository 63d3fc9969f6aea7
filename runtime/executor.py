"""Run one rank's action list over the pp fabric: activations go up, gradients come down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spec_compile.errors import InvariantError

from .fabric import Fabric
from .schedule import Actions, rank_of
from .timeline import span


class StageProgram(Protocol):
    """What one pipeline stage computes. Micro-batches differ in their number of rows."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Type of the hidden states, and of their gradients, between stages."""

    def hidden_shape(self, mb: int) -> tuple[int, ...]:
        """Shape of the hidden states of micro-batch ``mb``, the same at every stage boundary."""

    def forward(self, mb: int, hidden: Tensor | None) -> Tensor | None:
        """Compute from the previous stage's ``hidden`` (None on the first) what the next one gets.

        Returns None on the last stage.
        """

    def backward(self, mb: int, grad: Tensor | None, *, weights: bool = True) -> Tensor | None:
        """Compute the gradient of ``hidden`` from that of the output (None on the last stage).

        Returns None on the first stage, and when the target runs without gradient. On the last
        stage tap slots of ``mb`` are released inside this call: `tap_depths` counts on the credit
        being on its way before the gradient is. Without ``weights``, gradients of weights wait for
        `backward_weights`.
        """

    def backward_weights(self, mb: int) -> None:
        """Compute the gradients of weights that `backward` has left."""


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank, and how it reaches the others."""

    stages: Mapping[int, StageProgram]
    """By number."""
    num_stages: int
    """Of all ranks; stage s lies on rank ``s % pp.size``."""
    pp: Fabric

    def of(self, stage: int) -> StageProgram:
        """A stage of this rank."""
        if stage not in self.stages:
            raise InvariantError(
                f"pp rank {self.pp.rank} runs stages {sorted(self.stages)}, found an action of stage {stage}"
            )
        return self.stages[stage]

    def send(self, value: Tensor | None, mb: int, sender: int, receiver: int) -> None:
        """Send what ``sender`` made of micro-batch ``mb``, once it is what ``receiver`` expects."""
        program = self.of(sender)
        shape, dtype = tuple(program.hidden_shape(mb)), program.hidden_dtype
        if value is None or tuple(value.shape) != shape or value.dtype != dtype:
            what = "forward" if sender < receiver else "backward"
            found = "None" if value is None else f"{tuple(value.shape)} {value.dtype}"
            raise InvariantError(
                f"{what} of stage {sender}, micro-batch {mb} must return {shape} {dtype}, found {found}"
            )
        value = value.detach().contiguous()
        with span("send", sender, mb):
            self.pp.send(value, rank_of(receiver, self.pp.size), self._tag(mb, sender, receiver))

    def receive(self, mb: int, sender: int, receiver: int) -> Tensor:
        """Wait for what ``sender`` made of micro-batch ``mb``."""
        program = self.of(receiver)
        shape, dtype = program.hidden_shape(mb), program.hidden_dtype
        source = rank_of(sender, self.pp.size)
        with span("receive", receiver, mb):
            return self.pp.recv(shape, dtype, source, self._tag(mb, sender, receiver))

    def _tag(self, mb: int, sender: int, receiver: int) -> int:
        """Tell messages apart: a pair of ranks may share several edges between stages."""
        return 2 * (mb * self.num_stages + receiver) + (sender > receiver)


def run_schedule(actions: Actions, mine: RankStages, *, target_grad: bool = True) -> None:
    """Run this rank's forwards and backwards in order, and wait for its sends at the end.

    A send is never waited for before that: with rendezvous transports the peer may need something
    else of this rank first.

    Args:
        actions: This rank's list out of `build_schedule`.
        mine: What to compute.
        target_grad: False when the target runs without gradient: no gradients travel, and only the
            last stage, which holds the draft, runs backwards.

    Raises:
        InvariantError: An action is of another rank's stage, or a stage returned what the next one
            does not expect.
        ChannelError: A peer broke or missed a deadline.
    """
    for kind, stage, mb in actions:
        if kind == "F":
            _forward(mb, stage, mine)
        elif kind == "W":
            if target_grad:
                with span("weights", stage, mb):
                    mine.of(stage).backward_weights(mb)
        elif target_grad:
            _backward(mb, stage, mine, weights=kind == "B")
        elif stage == mine.num_stages - 1:
            with span("backward", stage, mb):
                mine.of(stage).backward(mb, None)
    mine.pp.flush()


def run_forward(actions: Actions, mine: RankStages) -> None:
    """Run the forwards of a list alone, without gradient, for log-probs and evaluation."""
    with torch.no_grad():
        for kind, stage, mb in actions:
            if kind == "F":
                _forward(mb, stage, mine)
        mine.pp.flush()


def _forward(mb: int, stage: int, mine: RankStages) -> None:
    program = mine.of(stage)
    hidden = mine.receive(mb, stage - 1, stage) if stage > 0 else None
    with span("forward", stage, mb):
        output = program.forward(mb, hidden)
    if stage < mine.num_stages - 1:
        mine.send(output, mb, stage, stage + 1)
    elif output is not None:
        raise InvariantError(f"the last stage's forward of micro-batch {mb} returned a tensor")


def _backward(mb: int, stage: int, mine: RankStages, *, weights: bool) -> None:
    program = mine.of(stage)
    grad = mine.receive(mb, stage + 1, stage) if stage < mine.num_stages - 1 else None
    with span("backward", stage, mb):
        output = program.backward(mb, grad, weights=weights)
    if stage > 0:
        mine.send(output, mb, stage, stage - 1)
    elif output is not None:
        raise InvariantError(f"the first stage's backward of micro-batch {mb} returned a tensor")

"""Run one stage's action list over the pp fabric: activations go up, gradients come down."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spec_compile.errors import InvariantError

from .fabric import Fabric
from .schedule import Action, Actions


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

    def backward(self, mb: int, grad: Tensor | None) -> Tensor | None:
        """Compute the gradient of ``hidden`` from that of the output (None on the last stage).

        Returns None on the first stage, and when the target runs without gradient. On the last
        stage tap slots of ``mb`` are released inside this call: `tap_depth` counts on the credit
        being on its way before the gradient is.
        """


def run_schedule(
    actions: Actions, stage: StageProgram, pp: Fabric, *, target_grad: bool = True
) -> None:
    """Run this rank's forwards and backwards in order, and wait for its sends at the end.

    A send is never waited for before that: with rendezvous transports the peer may need something
    else of this rank first.

    Args:
        actions: This rank's list out of `build_schedule`.
        stage: What to compute.
        pp: The fabric of the pipeline, one rank a stage.
        target_grad: False when the target runs without gradient: no gradients travel, and only the
            last stage, which holds the draft, runs backwards.

    Raises:
        InvariantError: An action is of another stage, or the stage returned what the next one does
            not expect.
        ChannelError: A peer broke or missed a deadline.
    """
    for action in actions:
        _check_stage(action, pp)
        if action.kind == "F":
            _forward(action.micro_batch, stage, pp)
        elif target_grad:
            _backward(action.micro_batch, stage, pp)
        elif _is_last(pp):
            stage.backward(action.micro_batch, None)
    pp.flush()


def run_forward(num_micro_batches: int, stage: StageProgram, pp: Fabric) -> None:
    """Run all forwards in order without gradient, for log-probs and evaluation."""
    with torch.no_grad():
        for micro_batch in range(num_micro_batches):
            _forward(micro_batch, stage, pp)
        pp.flush()


def _forward(mb: int, stage: StageProgram, pp: Fabric) -> None:
    hidden = None
    if pp.rank > 0:
        hidden = pp.recv(stage.hidden_shape(mb), stage.hidden_dtype, pp.rank - 1, _forward_tag(mb))
    output = stage.forward(mb, hidden)
    if _is_last(pp):
        if output is not None:
            raise InvariantError(f"the last stage's forward of micro-batch {mb} returned a tensor")
        return
    pp.send(
        _checked(output, f"forward of micro-batch {mb}", mb, stage), pp.rank + 1, _forward_tag(mb)
    )


def _backward(mb: int, stage: StageProgram, pp: Fabric) -> None:
    grad = None
    if not _is_last(pp):
        grad = pp.recv(stage.hidden_shape(mb), stage.hidden_dtype, pp.rank + 1, _backward_tag(mb))
    output = stage.backward(mb, grad)
    if pp.rank == 0:
        if output is not None:
            raise InvariantError(
                f"the first stage's backward of micro-batch {mb} returned a tensor"
            )
        return
    pp.send(
        _checked(output, f"backward of micro-batch {mb}", mb, stage), pp.rank - 1, _backward_tag(mb)
    )


def _forward_tag(mb: int) -> int:
    return 2 * mb


def _backward_tag(mb: int) -> int:
    return 2 * mb + 1


def _is_last(pp: Fabric) -> bool:
    return pp.rank == pp.size - 1


def _check_stage(action: Action, pp: Fabric) -> None:
    if action.stage != pp.rank:
        raise InvariantError(f"pp rank {pp.rank} runs stage {pp.rank}, found {action} in its list")


def _checked(value: Tensor | None, what: str, mb: int, stage: StageProgram) -> Tensor:
    """Refuse here what would reach the peer as garbage: it receives a shape it computed itself."""
    shape, dtype = stage.hidden_shape(mb), stage.hidden_dtype
    if value is None or tuple(value.shape) != tuple(shape) or value.dtype != dtype:
        found = "None" if value is None else f"{tuple(value.shape)} {value.dtype}"
        raise InvariantError(f"{what} must return {tuple(shape)} {dtype}, found {found}")
    return value.detach().contiguous()

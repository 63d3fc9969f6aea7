"""Gradients of one rank: set aside what was there, reduce what is new, clip by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .fabric import Control, Fabric

BUCKET_ELEMENTS = 1 << 24
"""Elements of one all-reduce."""


@dataclass(frozen=True)
class OwnedParameters:
    """The parameters that this rank trains."""

    policy: list[nn.Parameter]
    draft: list[nn.Parameter]
    tied: list[nn.Parameter]
    """Policy parameters that the first and the last stage both own."""
    counts_tied: bool
    """Whether this rank's norm includes the tied parameters: the first stage's does."""

    def group(self, name: str) -> list[nn.Parameter]:
        """Parameters of the group "policy" or "draft"."""
        return self.policy if name == "policy" else self.draft


class GradientLedger:
    """Keeps gradients that are already whole apart from those that still have to be summed."""

    def __init__(self, owned: OwnedParameters, fabrics: Mapping[str, Fabric]) -> None:
        self._owned, self._fabrics = owned, fabrics
        self._held: dict[nn.Parameter, Tensor] = {}
        self.pending = False

    def begin(self) -> None:
        """Set aside what earlier steps left in ``.grad``; nothing while new gradients are pending."""
        if self.pending:
            return
        self.pending = True
        for parameter in self._all():
            if parameter.grad is not None:
                self._held[parameter] = parameter.grad
                parameter.grad = None

    def restore(self) -> None:
        """Drop the new gradients and put back the old ones."""
        for parameter in self._all():
            parameter.grad = self._held.pop(parameter, None)
        self.pending = False

    def finish(self, groups: Sequence[str]) -> None:
        """Sum the new gradients over cp and dp, tied ones over stages too, and add the old ones."""
        for name in groups:
            self._reduce(self._owned.group(name), self._fabrics["grads"])
        if "policy" in groups and self._owned.tied:
            self._reduce(self._owned.tied, self._fabrics["tied"])
        for parameter, old in self._held.items():
            if parameter.grad is None:
                parameter.grad = old
            else:
                parameter.grad = old.add_(parameter.grad)
        self._held.clear()
        self.pending = False

    def _all(self) -> Iterator[nn.Parameter]:
        yield from self._owned.policy
        yield from self._owned.draft

    def _reduce(self, parameters: Sequence[nn.Parameter], fabric: Fabric) -> None:
        if fabric.size == 1:
            return
        for bucket in buckets([p for p in parameters if p.grad is not None]):
            grads = [p.grad for p in bucket]
            flat = torch.cat([_wide(g).reshape(-1) for g in grads if g is not None])
            fabric.all_reduce_(flat)
            offset = 0
            for grad in grads:
                assert grad is not None
                grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
                offset += grad.numel()


def _wide(grad: Tensor) -> Tensor:
    """Gradients are summed in fp32, or fp64 when they are fp64."""
    return grad if grad.dtype == torch.float64 else grad.float()


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group parameters of one summing type into runs of about `BUCKET_ELEMENTS`; order is kept."""
    run: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        double = parameter.dtype == torch.float64
        if run and (
            size + parameter.numel() > BUCKET_ELEMENTS or double != (run[0].dtype == torch.float64)
        ):
            yield run
            run, size = [], 0
        run.append(parameter)
        size += parameter.numel()
    if run:
        yield run


def clip(
    owned: OwnedParameters,
    control: Control,
    stages: Mapping[int, int],
    limits: Mapping[str, float | None],
    *,
    deadline_s: float,
) -> dict[str, float]:
    """Clip each group to its own norm over all stages; a tied parameter counts once.

    Args:
        stages: rank -> stage, for the ranks whose sums count (one a stage).
        limits: group -> largest norm, or None to measure only.

    Returns:
        Norm of each group before clipping, the same on every rank.
    """
    tied = {id(p) for p in owned.tied} if not owned.counts_tied else set()
    squares = {
        name: sum(
            float(p.grad.detach().double().square().sum())
            for p in owned.group(name)
            if p.grad is not None and id(p) not in tied
        )
        for name in limits
    }
    gathered = control.all_gather({"squares": squares}, deadline_s=deadline_s)
    norms: dict[str, float] = {}
    for name, limit in limits.items():
        total = sum(gathered[rank]["squares"][name] for rank in sorted(stages))
        norms[name] = total**0.5
        if limit is not None:
            factor = limit / (norms[name] + 1e-6)
            if factor < 1.0:
                for parameter in owned.group(name):
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
    return norms

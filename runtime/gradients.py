"""Gradients of one rank: set aside what was there, reduce what is new, clip by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError

from .fabric import Fabric

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

    def refusal(self, call: str) -> ConfigError | None:
        """Why a call cannot begin on new gradients that are not summed yet; None when there are none."""
        if not self.pending:
            return None
        return ConfigError(
            f"{call} found gradients of model(batch) that are not summed over ranks yet; call finalize_grads() first, "
            "also when zero_grad() is to drop them"
        )

    def present(self) -> list[bool]:
        """Which parameters have a new gradient, in the order that all ranks of a stage share."""
        return [self.pending and p.grad is not None for p in self._all()]

    def complete(self, present: Sequence[bool]) -> None:
        """Add zeros where peers have a new gradient and this rank has none: every rank sums the same ones."""
        self.begin()
        for parameter, found in zip(self._all(), present, strict=True):
            if found and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

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
        both = [(old, p.grad) for p, old in self._held.items() if p.grad is not None]
        if both:
            # a few launches for all of them
            torch._foreach_add_([old for old, _ in both], [new for _, new in both])
        for parameter, old in self._held.items():
            parameter.grad = old
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


def squared_norms(owned: OwnedParameters) -> dict[str, float]:
    """Squared norm of this rank's gradients by group; a tied parameter counts on one stage."""
    tied = {id(p) for p in owned.tied} if not owned.counts_tied else set()
    sums: dict[str, float] = {}
    for name in ("policy", "draft"):
        counted = [p for p in owned.group(name) if p.grad is not None and id(p) not in tied]
        squares = [p.grad.detach().double().square().sum() for p in counted if p.grad is not None]
        # read back together: the host waits once, not for every parameter
        sums[name] = sum(torch.stack(squares).tolist()) if squares else 0.0
    return sums


def clip(owned: OwnedParameters, name: str, norm: float, limit: float) -> None:
    """Scale a group's gradients from ``norm`` down to ``limit``."""
    factor = limit / (norm + 1e-6)
    if factor < 1.0:
        for parameter in owned.group(name):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

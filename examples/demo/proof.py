"""Why one may believe a step: exact where it must be exact, and the same numbers as plain PyTorch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import grpo

from .plain import StepNumbers
from .processes import everyone

TOLERANCE = 1e-4
"""Largest relative difference to plain PyTorch: fp32 sums in another order."""


@dataclass
class Proof:
    """Lines to show, and the claims that did not hold."""

    lines: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def claim(self, holds: bool, text: str) -> None:
        """Add a line, marked by whether it holds."""
        self.lines.append(f"  {'yes' if holds else 'NO '}  {text}")
        if not holds:
            self.broken.append(text)


def prove(
    model: sc.ParallelModel, batch: sc.PackedBatch, plain: StepNumbers, temperature: float
) -> Proof:
    """Run one step twice, with and without the draft, at unchanged weights; leaves no gradients."""
    old = model.logprobs(batch, temperature=temperature)
    valid = batch.loss_mask.clone()
    valid[batch.cu_seqlens[:-1]] = False
    mean_logprob = _over_dp(model, old[valid])
    batch = dataclasses.replace(batch, fields={**batch.fields, "old_logprobs": old})
    loss = grpo.DapoLoss()
    result = model.step(batch, loss, temperature=temperature)
    norms = model.clip_grad_norm_()
    policy = {id(p): (n, p) for n, p in model.target.named_parameters() if p.grad is not None}
    held = {key: p.grad.clone() for key, (_, p) in policy.items() if p.grad is not None}
    model.target.zero_grad()
    if model.draft is not None:
        model.draft.zero_grad()
    model.step(batch, loss, temperature=temperature, train_draft=False)
    same = {n: bool(torch.equal(held[k], _grad(p))) for k, (n, p) in policy.items()}
    model.target.zero_grad()
    tables = everyone(same)

    proof = Proof()
    metrics = result.metrics
    low, high = metrics["ratio/min"], metrics["ratio/max"]
    proof.claim(
        low == high == 1.0,
        f"ratio exp(new - old) is exactly 1 at unchanged weights: smallest {low!r}, largest {high!r}",
    )
    tensors = {name for table in tables for name in table}
    differing = {name for table in tables for name, equal in table.items() if not equal}
    proof.claim(
        not differing,
        f"policy gradients are bit-equal with the draft on and off: {len(tensors) - len(differing)} "
        f"of {len(tensors)} tensors",
    )
    found = StepNumbers(
        policy_loss=result.policy_loss,
        mean_entropy=metrics["entropy"],
        mean_logprob=mean_logprob,
        draft_loss=result.draft_loss,
        policy_gradient_norm=norms["policy"],
        draft_gradient_norm=norms["draft"],
    )
    _compare(proof, found, plain)
    return proof


def _over_dp(model: sc.ParallelModel, values: Tensor) -> float:
    """Mean over the documents of all dp ranks; each is held by ``cp * pp`` ranks alike."""
    parts = everyone((float(values.double().sum()), len(values)))
    return float(sum(part[0] for part in parts) / max(sum(part[1] for part in parts), 1))


def _compare(proof: Proof, found: StepNumbers, plain: StepNumbers) -> None:
    size = len(everyone(None))
    proof.lines.append(
        f"       {'':22}{f'{size} processes':>16}{'plain PyTorch':>16}   relative difference"
    )
    for name, value in dataclasses.asdict(found).items():
        other = getattr(plain, name)
        gap = abs(value - other) / max(abs(other), 1e-12)
        proof.claim(
            gap <= TOLERANCE,
            f"{name.replace('_', ' '):22}{value:16.6f}{other:16.6f}   {gap:.1e}",
        )


def _grad(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad

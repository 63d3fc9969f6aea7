"""The same step in plain PyTorch: one process, no compiler, logits in full, one document at a time."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import spec_compile as sc

from .show import say
from .task import Workload


@dataclass(frozen=True)
class StepNumbers:
    """What both ways of computing one step must agree on."""

    policy_loss: float
    mean_entropy: float
    mean_logprob: float
    draft_loss: float
    policy_gradient_norm: float
    draft_gradient_norm: float


@dataclass(frozen=True)
class Rows:
    """What the target gives for each token of a packed row."""

    features: Tensor
    """[T, m * D]."""
    hidden: Tensor
    """[T, D]."""
    logprobs: Tensor
    """[T]."""
    entropy: Tensor
    """[T]."""


def plain_step(work: Workload, batch: sc.PackedBatch) -> StepNumbers:
    """Run forward and backward of one batch, with the draft's eager module."""
    target, draft = work.target, work.draft
    started = time.perf_counter()
    rows = _run_target(work, batch)
    say(f"  forward of {len(batch.tokens)} tokens in {time.perf_counter() - started:.1f} s")
    lengths = batch.cu_seqlens.diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(len(batch.tokens)) - batch.cu_seqlens[document]
    mask = batch.loss_mask & (positions > 0)
    count = int(mask.sum())
    # DAPO at unchanged weights: the ratio is 1, its gradient that of the log-prob
    ratio = torch.exp(rows.logprobs - rows.logprobs.detach())
    loss = -(ratio * batch.fields["advantages"])[mask].sum() / count
    loss.backward()
    say(f"  loss and gradients after {time.perf_counter() - started:.1f} s; now the draft")
    output = draft(_draft_inputs(target, batch, rows, document, positions, mask))
    draft_loss = (output.loss_sum / output.count).sum()
    draft_loss.backward()
    numbers = StepNumbers(
        policy_loss=float(loss.detach()),
        mean_entropy=float(rows.entropy.detach()[mask].mean()),
        mean_logprob=float(rows.logprobs.detach()[mask].mean()),
        draft_loss=float(draft_loss.detach()),
        policy_gradient_norm=_norm(target),
        draft_gradient_norm=_norm(draft),
    )
    say(f"  whole step in {time.perf_counter() - started:.1f} s")
    return numbers


def _draft_inputs(
    target: nn.Module,
    batch: sc.PackedBatch,
    rows: Rows,
    document: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> sc.DraftInputs:
    embedding = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    head = target.get_output_embeddings().weight.detach()  # type: ignore[operator]
    return sc.DraftInputs(
        features=rows.features.detach(),
        tokens=batch.tokens,
        positions=positions,
        document=document,
        index=torch.arange(len(batch.tokens)),
        loss_mask=mask,
        embedding=lambda ids: nn.functional.embedding(ids, embedding),
        teacher=SimpleNamespace(hidden=rows.hidden.detach(), weight=head),
    )


def _run_target(work: Workload, batch: sc.PackedBatch) -> Rows:
    parts: list[list[Tensor]] = [[], [], [], []]
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        ids = batch.tokens[start:end]
        output = work.target(ids[None], output_hidden_states=True, use_cache=False)
        law = (output.logits[0, :-1] / work.temperature).log_softmax(-1)
        first = law.new_zeros(1)
        parts[0].append(torch.cat([output.hidden_states[tap][0] for tap in work.draft.taps], -1))
        parts[1].append(output.hidden_states[-1][0])
        parts[2].append(torch.cat([first, law.gather(-1, ids[1:, None])[:, 0]]))
        parts[3].append(torch.cat([first, -(law.exp() * law).sum(-1)]))
    return Rows(*(torch.cat(part) for part in parts))


def _norm(module: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())

"""The same step in plain PyTorch: one process, no compiler, logits in full, one document at a time."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import spec_compile as sc

from .task import Workload, pack, policy_loss


@dataclass(frozen=True)
class StepNumbers:
    """What both ways of computing one step must agree on."""

    policy_loss: float
    mean_logprob: float
    mean_entropy: float
    draft_loss: float
    policy_gradient_norm: float
    draft_gradient_norm: float


def plain_step(work: Workload) -> StepNumbers:
    """Run forward and backward of the first training batch, with the draft's eager module."""
    target, draft = work.target, work.draft
    batch = pack(work.train[0])
    started = time.perf_counter()
    features, hidden, logprobs, entropy = _run_target(work, batch)
    _say(f"forward of {len(batch.tokens)} tokens in {time.perf_counter() - started:.1f} s")
    index = torch.arange(len(batch.tokens))
    lengths = batch.cu_seqlens.diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = index - batch.cu_seqlens[document]
    mask = batch.loss_mask & (positions > 0)
    rows = sc.TokenOutputs(
        logprobs=logprobs,
        entropy=entropy,
        mask=mask,
        tokens=batch.tokens,
        document=document,
        cu_seqlens=batch.cu_seqlens,
        fields={**batch.fields, "old_logprobs": logprobs.detach()},
    )
    loss, sums = policy_loss(rows)
    count = int(mask.sum())
    (loss / count).backward()
    _say(f"loss and gradients after {time.perf_counter() - started:.1f} s; now the draft")
    embedding = target.get_input_embeddings().weight.detach()
    output = draft(
        sc.DraftInputs(
            features=features.detach(),
            tokens=batch.tokens,
            positions=positions,
            document=document,
            index=index,
            loss_mask=mask,
            embedding=lambda ids: nn.functional.embedding(ids, embedding),
            teacher=SimpleNamespace(
                hidden=hidden.detach(), weight=target.get_output_embeddings().weight.detach()
            ),
        )
    )
    draft_loss = (output.loss_sum / output.count).sum()
    draft_loss.backward()
    numbers = StepNumbers(
        policy_loss=float(loss.detach()) / count,
        mean_logprob=float(sums["logprob"].detach()) / count,
        mean_entropy=float(sums["entropy"].detach()) / count,
        draft_loss=float(draft_loss.detach()),
        policy_gradient_norm=_norm(target),
        draft_gradient_norm=_norm(draft),
    )
    _say(f"whole step in {time.perf_counter() - started:.1f} s")
    return numbers


def _run_target(work: Workload, batch: sc.PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features [T, m * D], final hidden states [T, D], log-probs and entropies [T] of the tokens."""
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
    features, hidden, logprobs, entropy = (torch.cat(part) for part in parts)
    return features, hidden, logprobs, entropy


def _norm(module: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def _say(line: str) -> None:
    print(f"[plain] {line}", flush=True)

"""The joint training step on one device, dense and plain: what every compiled step must equal.

Independent of the package's attention, shift, loss and batch code: the target runs by itself on
each document, and a draft runs eagerly on inputs that are built here by hand.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.batch import PackedBatch
from spec_compile.contract import DraftInputs, DraftOutput, TokenOutputs

PolicyLoss = Callable[[TokenOutputs], Any]
DraftBody = Callable[[DraftInputs], DraftOutput]


@dataclass
class DenseResult:
    """What a step reports and every gradient, by parameter name; zeros where none arrived."""

    policy_loss: float = 0.0
    draft_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    draft_stats: dict[str, Tensor] = field(default_factory=dict)
    policy_count: float = 0.0
    draft_count: Tensor | None = None
    policy_grads: dict[str, Tensor] = field(default_factory=dict)
    draft_grads: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)


@dataclass
class TargetRow:
    """The target on one packed row."""

    logits: Tensor
    """[T, V]."""
    hidden: Tensor
    """After the final norm, [T, D_t]."""
    features: Tensor
    """[T, m * D_t]."""


def dense_step(
    target: Any,
    draft: nn.Module | None,
    batches: PackedBatch | Sequence[PackedBatch],
    policy_loss: PolicyLoss | None,
    *,
    temperature: float = 1.0,
    draft_weight: float = 1.0,
    denominator: float | None = None,
    draft_denominator: Any = None,
    train_draft: bool = True,
    draft_body: DraftBody | None = None,
) -> DenseResult:
    """Run one joint step; several batches count as those of several data-parallel ranks.

    ``draft_body`` replaces the draft's own forward (its parameters must be the draft's). No
    ``.grad`` is read or written, and no module changes.
    """
    parts = [batches] if isinstance(batches, PackedBatch) else list(batches)
    result = DenseResult()
    with evaluating(target):
        taps: tuple[int, ...] = getattr(draft, "taps", ())
        rows = [run_target(target, batch, taps, grad=policy_loss is not None) for batch in parts]
        _policy_half(result, target, parts, rows, policy_loss, temperature, denominator)
        if draft is not None and train_draft:
            body = draft_body or draft
            outputs = [body(draft_inputs(target, b, r)) for b, r in zip(parts, rows, strict=True)]
            _draft_half(result, draft, outputs, draft_weight, draft_denominator)
    return result


def run_target(target: Any, batch: PackedBatch, taps: Sequence[int], *, grad: bool) -> TargetRow:
    """Run the target document by document and lay the results end to end."""
    head = target.get_output_embeddings().weight
    logits, hidden, features = [], [], []
    with torch.set_grad_enabled(grad):
        for ids in documents_of(batch, batch.tokens):
            if not len(ids):
                continue
            out = target(input_ids=ids[None], output_hidden_states=True, use_cache=False)
            logits.append(out.logits[0])
            hidden.append(out.hidden_states[-1][0])
            tapped = [out.hidden_states[tap][0] for tap in taps]
            features.append(torch.cat(tapped, -1) if taps else hidden[-1][:, :0])
    if not logits:
        dim = head.shape[1]
        none = head.new_zeros
        return TargetRow(none(0, head.shape[0]), none(0, dim), none(0, dim * len(taps)))
    return TargetRow(torch.cat(logits), torch.cat(hidden), torch.cat(features))


def token_outputs(batch: PackedBatch, logits: Tensor, temperature: float) -> TokenOutputs:
    """Log-prob and entropy of each token under the law that produced it; 0 at first tokens."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    laws = (wide / temperature).log_softmax(-1)
    logprobs, entropy = [], []
    for ids, law in zip(documents_of(batch, batch.tokens), documents_of(batch, laws), strict=True):
        zero = law.new_zeros(min(len(ids), 1))
        logprobs += [zero, law[:-1][torch.arange(max(len(ids) - 1, 0)), ids[1:]]]
        entropy += [zero, -(law[:-1].exp() * law[:-1]).sum(-1)]
    return TokenOutputs(
        logprobs=torch.cat(logprobs) if logprobs else wide.new_zeros(0),
        entropy=torch.cat(entropy) if entropy else wide.new_zeros(0),
        mask=batch.loss_mask & ~first_tokens(batch),
        tokens=batch.tokens,
        document=document_numbers(batch),
        cu_seqlens=batch.cu_seqlens.long(),
        fields=dict(batch.fields),
    )


def draft_inputs(target: Any, batch: PackedBatch, row: TargetRow) -> DraftInputs:
    """Build a draft's inputs by hand, detached from the target."""
    embedding = target.get_input_embeddings().weight.detach()
    lengths = [len(ids) for ids in documents_of(batch, batch.tokens)]
    mask = batch.loss_mask if batch.draft_mask is None else batch.draft_mask
    head = target.get_output_embeddings().weight.detach()
    return DraftInputs(
        features=row.features.detach(),
        tokens=batch.tokens,
        positions=torch.tensor([t for n in lengths for t in range(n)], dtype=torch.int64),
        document=document_numbers(batch),
        index=torch.arange(len(batch.tokens)),
        loss_mask=mask & ~first_tokens(batch),
        embedding=lambda ids: F.embedding(ids, embedding),
        teacher=SimpleNamespace(hidden=row.hidden.detach(), weight=head),
        anchors=batch.anchors,
    )


def documents_of(batch: PackedBatch, x: Tensor) -> list[Tensor]:
    """Cut [T, ...] into one piece a document."""
    offsets = batch.cu_seqlens.tolist()
    return [x[start:end] for start, end in itertools.pairwise(offsets)]


def document_numbers(batch: PackedBatch) -> Tensor:
    lengths = [len(ids) for ids in documents_of(batch, batch.tokens)]
    return torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64)


def first_tokens(batch: PackedBatch) -> Tensor:
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        if end > start:
            first[start] = True
    return first


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout off, then give every submodule its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Differentiate by every trainable parameter; zeros where the loss does not depend on it."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not loss.requires_grad:
        return {name: torch.zeros_like(p) for name, p in named.items()}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(named.items(), grads, strict=True)
    }


def _policy_half(
    result: DenseResult,
    target: nn.Module,
    batches: list[PackedBatch],
    rows: list[TargetRow],
    policy_loss: PolicyLoss | None,
    temperature: float,
    denominator: float | None,
) -> None:
    views = [
        token_outputs(batch, row.logits, temperature)
        for batch, row in zip(batches, rows, strict=True)
    ]
    result.logprobs = [view.logprobs.detach() for view in views]
    result.entropy = [view.entropy.detach() for view in views]
    result.policy_count = float(sum(int(view.mask.sum()) for view in views))
    if policy_loss is None:
        return
    divisor = result.policy_count if denominator is None else float(denominator)
    scale = 0.0 if divisor == 0 else 1 / divisor
    total = torch.zeros((), dtype=rows[0].logits.dtype) if rows else torch.zeros(())
    sums: dict[str, list[float]] = {}
    for view in views:
        returned = policy_loss(view)
        loss, named = returned if isinstance(returned, tuple) else (returned, {})
        total = total + loss
        for name, value in named.items():
            sums.setdefault(name, []).append(float(torch.as_tensor(value).detach()))
    result.policy_loss = float(total.detach()) * scale
    for name, values in sums.items():
        if name.endswith("/max"):
            result.metrics[name] = max(values)
        elif name.endswith("/min"):
            result.metrics[name] = min(values)
        else:
            result.metrics[name] = sum(values) * scale
    result.policy_grads = gradients(total * scale, target)


def _draft_half(
    result: DenseResult,
    draft: nn.Module,
    outputs: list[DraftOutput],
    draft_weight: float,
    draft_denominator: Any,
) -> None:
    sums = torch.stack([output.loss_sum for output in outputs]).sum(0)
    count = torch.stack([output.count for output in outputs]).sum(0).to(sums.dtype)
    divisor = count if draft_denominator is None else torch.as_tensor(draft_denominator)
    share = torch.where(divisor == 0, 0.0, 1 / divisor.to(sums.dtype))
    loss = (sums * share).sum()
    result.draft_count = count.detach()
    result.draft_loss = float(loss.detach())
    for name in outputs[0].stats:
        total = torch.stack([output.stats[name] for output in outputs]).sum(0)
        result.draft_stats[name] = (total * share).detach()
    result.draft_grads = gradients(draft_weight * loss, draft)

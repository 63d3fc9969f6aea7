"""Plain eager bodies of the declared operators: what every lowered form must equal.

Legend: T rows of the packed row, R query rows, S main keys, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .dtypes import accumulator

Branch = tuple[Tensor, Tensor, Tensor, Tensor]


def branch_attention(
    q: Tensor,
    k_main: Tensor,
    v_main: Tensor,
    branches: Sequence[Branch],
    *,
    q_limit: Tensor,
    q_document: Tensor,
    k_document: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over visible main keys and branch keys with one softmax; [R, Hq, Dv]."""
    work = accumulator(q.dtype)
    group = q.shape[1] // k_main.shape[1]
    index = torch.arange(k_main.shape[0], device=q.device)
    visible = (k_document[None, :] == q_document[:, None]) & (index[None, :] < q_limit[:, None])
    if window is not None:
        visible = visible & (index[None, :] >= q_limit[:, None] - window)
    keys, values, masks = [k_main], [v_main], [visible]
    for k, v, k_group, q_group in branches:
        keys.append(k)
        values.append(v)
        masks.append(k_group[None, :] == q_group[:, None])
    k_all = torch.cat(keys).to(work).repeat_interleave(group, 1)
    v_all = torch.cat(values).to(work).repeat_interleave(group, 1)
    mask = torch.cat(masks, 1)[None]
    scores = torch.einsum("rhd,shd->hrs", q.to(work), k_all) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(work)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, column], -1)
    # a row that sees nothing would softmax to NaN; give it finite scores, then zero weights
    seen = mask.any(-1, keepdim=True)
    seen = seen if sinks is None else torch.ones_like(seen)
    weights = scores.masked_fill(~seen, 0.0).softmax(-1)[..., : k_all.shape[0]]
    weights = weights.masked_fill(~mask, 0.0)
    return torch.einsum("hrs,shd->rhd", weights, v_all).to(q.dtype)


def shift(x: Tensor, k: int, document: Tensor) -> Tensor:
    """``y[t] = x[t + k]`` inside the same document, else 0 / False."""
    rows = torch.arange(x.shape[0], device=x.device) + k
    inside = (rows >= 0) & (rows < x.shape[0])
    rows = rows.clamp(0, max(x.shape[0] - 1, 0))
    inside = inside & (document[rows] == document)
    keep = inside.reshape(-1, *([1] * (x.ndim - 1)))
    return torch.where(keep, x[rows], torch.zeros((), dtype=x.dtype, device=x.device))


def row_shift(x: Tensor, k: int, ends: str, value: float) -> Tensor:
    """``y[t] = x[t + k]`` over the whole packed row; see `ops.declared_row_shift` for its ends."""
    total = x.shape[0]
    if ends != "fill":
        k = k if ends == "roll" else max(-total, min(total, k))
        return x.roll(-k, 0)
    rows = torch.arange(total, device=x.device) + k
    inside = ((rows >= 0) & (rows < total)).reshape(-1, *([1] * (x.ndim - 1)))
    moved = x[rows.clamp(0, max(total - 1, 0))]
    return torch.where(inside, moved, torch.full((), value, dtype=x.dtype, device=x.device))


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy (nats) of softmax(hidden @ weight.T / temperature).

    Rows whose label is negative give 0 for both. hidden [T, D], weight [V, D], labels int64 [T].
    """
    work = accumulator(hidden.dtype)
    logp = F.log_softmax(F.linear(hidden, weight).to(work) / temperature.to(work), -1)
    live = labels >= 0
    picked = logp.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return torch.where(live, picked, 0.0), torch.where(live, entropy, 0.0)


def soft_cross_entropy(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Per row: cross-entropy of the student's law to the teacher's, and sum of min(p, q).

    student [T, D], student_weight [V, D], teacher [T, D_t], teacher_weight [V, D_t]; both results
    [T] in fp32 (fp64 for fp64). No gradient reaches the teacher or passes through the second.
    """
    work = accumulator(student.dtype)
    p = F.softmax(F.linear(teacher, teacher_weight).to(work), -1).detach()
    logq = F.log_softmax(F.linear(student, student_weight).to(work), -1)
    return -(p * logq).sum(-1), torch.minimum(p, logq.detach().exp()).sum(-1)


def label_losses(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    extra: Tensor | None,
    extra_weight: Tensor | None,
    columns: Tensor | None = None,
    renormalised: bool = False,
) -> tuple[Tensor, Tensor]:
    """Per row: minus the label's log-probability, and sum of |q - p|; 0 where the label is negative.

    student [R, D], student_weight [V_d, D], teacher [R, D_t], teacher_weight [V, D_t], labels int64 [R],
    extra [R, r], extra_weight [V_d, r], columns int64 [V_d]; both results [R] in fp32 (fp64 for fp64).
    """
    work = accumulator(student.dtype)
    logits = F.linear(student, student_weight).to(work)
    if extra is not None and extra_weight is not None:
        logits = logits + F.linear(extra, extra_weight).to(work)
    logq = F.log_softmax(logits, -1)
    law = F.linear(teacher, teacher_weight).to(work).detach()
    if columns is not None and renormalised:
        p = F.softmax(law[:, columns], -1)
    else:
        p = F.softmax(law, -1)
        p = p if columns is None else p[:, columns]
    live = labels >= 0
    at = labels if columns is None else places(labels, columns, teacher_weight.shape[0])
    picked = logq.gather(-1, at.clamp_min(0)[:, None])[:, 0]
    l1 = (logq.exp() - p).abs().sum(-1) + (1 - p.sum(-1) if columns is not None else 0.0)
    return torch.where(at >= 0, -picked, 0.0), torch.where(live, l1, 0.0)


def places(ids: Tensor, columns: Tensor, size: int) -> Tensor:
    """Where each of the target's ids is among the columns, int64 like ``ids``; -1 for others and for negative ids."""
    table = columns.new_full((size,), -1)
    table[columns] = torch.arange(columns.shape[0], device=columns.device)
    return torch.where(ids >= 0, table[ids.clamp_min(0)], -1)


def law_losses(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    columns: Tensor | None,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: cross-entropy, overlap, entropy, and whether the likeliest token is a column; 0 where not live.

    student [R, D], student_weight [V_d, D], teacher [R, D_t], teacher_weight [V, D_t], columns int64 [V_d],
    live bool [R]; results [R] in fp32 (fp64 for fp64). The first two carry gradients of the student's.
    """
    work = accumulator(student.dtype)
    logq = F.log_softmax(F.linear(student, student_weight).to(work), -1)
    whole = F.linear(teacher, teacher_weight).to(work).detach()
    part = whole if columns is None else whole[:, columns]
    logp = F.log_softmax(part, -1)
    p = F.softmax(whole, -1) if columns is None else F.softmax(whole, -1)[:, columns]
    known = (part.amax(-1) >= whole.amax(-1)).to(work)
    values = (
        -(logp.exp() * logq).sum(-1),
        torch.minimum(p, logq.exp()).sum(-1),
        -(logp.exp() * logp).sum(-1),
        known,
    )
    ce, overlap, entropy, known = (torch.where(live, value, 0.0) for value in values)
    return ce, overlap, entropy, known

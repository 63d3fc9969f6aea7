"""How far a draft's law, over all tokens or some of them, is from the target's, as numbers to build losses from.

Logits [R, V] never exist: a chunk of rows spans the vocabulary, and the backward computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.operator import operator

from .logit_chunks import (
    RowValues,
    full_law_chunks,
    joined,
    law_,
    logits_of,
    pick_rows,
    plus_product,
    put_rows,
    row_dot,
    whole,
)


@operator("chunked_law_losses")
def chunked_law_losses(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    columns: Tensor | None,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: cross-entropy, overlap, the target's entropy, and whether its likeliest token is drafted.

    Args:
        student: [R, D]; q = softmax(student @ student_weight.T).
        student_weight: [V_d, D].
        teacher: [R, D_t]; p = softmax(teacher @ teacher_weight.T); no gradient reaches it.
        teacher_weight: [V, D_t]; no gradient reaches it.
        columns: int64 [V_d], the target's ids of the student's tokens; None: all, in order.
        live: bool [R]; other rows give 0 for everything and cost nothing.

    Returns:
        Four vectors [R], fp32 (fp64 for fp64): cross-entropy of q to p renormalised over the columns; sum over
        the columns of min(p, q), p over all tokens; entropy of the renormalised p; 1 where the likeliest
        token under p is a column. The first two carry gradients.
    """
    at, student, teacher = pick_rows(live, student, teacher)
    results = RowValues(4, at, live.shape[0], student)
    for rows in full_law_chunks(student.shape[0], teacher_weight.shape[0], student.device):
        p, share, entropy, known = _target(logits_of(teacher[rows], teacher_weight), columns)
        logits = logits_of(student[rows], student_weight)
        centred = logits.sub_(logits.amax(1)[:, None])
        mean = row_dot(p, centred)
        q, lse = law_(centred)
        overlap = torch.minimum(p.mul_(share[:, None]), q).sum(1)
        results.put(rows, lse - mean, overlap, entropy, known)
    ce, overlap, entropy, known = results.vectors
    return ce, overlap, entropy, known


def _target(logits: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The target's law over the columns, their share of all, its entropy, and whether the top is among them."""
    whole = logits.logsumexp(1)
    part = logits.clone() if columns is None else logits[:, columns]
    known = (part.amax(1) >= logits.amax(1)).to(logits.dtype)
    log_law = part - part.logsumexp(1, keepdim=True)
    share = (part.logsumexp(1) - whole).exp()
    p = log_law.exp()
    return p, share, -row_dot(p, log_law), known


@chunked_law_losses.register_fake
def _(student: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (
        student.new_empty(student.shape[0], dtype=accumulator(student.dtype)) for _ in range(4)
    )
    return a, b, c, d


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2], output[3])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(
    ctx: Any, d_ce: Tensor | None, d_overlap: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    student, student_weight, teacher, teacher_weight, columns, live = ctx.saved_tensors
    work = accumulator(student.dtype)
    d_ce, d_overlap = (
        student.new_zeros(live.shape[0], dtype=work) if d is None else d for d in (d_ce, d_overlap)
    )
    live = live & ((d_ce != 0) | (d_overlap != 0))
    at, student, teacher, d_ce, d_overlap = pick_rows(live, student, teacher, d_ce, d_overlap)
    needs_student, needs_weight = ctx.needs_input_grad[:2]
    d_rows: list[Tensor] = []
    d_weight: Tensor | None = None
    for rows in full_law_chunks(student.shape[0], teacher_weight.shape[0], student.device):
        p, share, _, _ = _target(logits_of(teacher[rows], teacher_weight), columns)
        q, _ = law_(logits_of(student[rows], student_weight))
        grad = (q - p).mul_(d_ce[rows, None])
        # d overlap / d logit = q * (s - <s, q>), where s says that q is the smaller one
        side = torch.heaviside(p.mul_(share[:, None]) - q, p.new_tensor(0.5))
        lean = row_dot(side, q)
        grad += q.mul_(side.sub_(lean[:, None])).mul_(d_overlap[rows, None])
        grad = grad.to(student.dtype)
        if needs_student:
            d_rows.append(grad @ student_weight)
        if needs_weight:
            d_weight = plus_product(d_weight, grad.t(), student[rows])
    return (
        put_rows(joined(d_rows, student), at, live.shape[0]) if needs_student else None,
        whole(d_weight, student_weight) if needs_weight else None,
        None, None, None, None,
    )  # fmt: skip


chunked_law_losses.register_autograd(_backward, setup_context=_setup)

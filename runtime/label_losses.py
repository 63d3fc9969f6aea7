"""Two losses of a draft's law in one pass: of the token that came, and of the target's whole law.

Logits [R, V] never exist: a chunk of rows spans the vocabulary, and the backward computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.operator import operator
from spec_compile.ir.reference import places

from . import draft_laws
from .logit_chunks import (
    RowValues,
    full_law_chunks,
    joined,
    logits_of,
    pick_rows,
    plus_product,
    put_rows,
    whole,
)


@operator("chunked_label_losses")
def chunked_label_losses(
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
    """Per row: minus the label's log-probability, and sum of |q - p|.

    Args:
        student: [R, D]; q = softmax(student @ student_weight.T + extra @ extra_weight.T).
        student_weight: [V_d, D].
        teacher: [R, D_t]; p = softmax(teacher @ teacher_weight.T); no gradient reaches it.
        teacher_weight: [V, D_t]; no gradient reaches it.
        labels: int64 [R], the target's ids; rows with a negative label give 0 for both and cost nothing.
        extra: [R, r], or None.
        extra_weight: [V_d, r], or None.
        columns: int64 [V_d], the target's ids of the student's tokens; None: all, in order. A label that is none
            of them gives 0 for the first.
        renormalised: p is renormalised over the columns; else q is 0 for the other tokens.

    Returns:
        Two vectors [R], fp32 (fp64 for fp64).
    """
    num_rows = labels.shape[0]
    at, student, teacher, labels, *more = _live(labels, student, teacher, extra)
    labels = _places(labels, columns, teacher_weight)
    pairs = _pairs(student, student_weight, more, extra_weight)
    results = RowValues(2, at, num_rows, student)
    for rows in full_law_chunks(student.shape[0], teacher_weight.shape[0], student.device):
        q_parts = [logits_of(x[rows], weight) for x, weight in pairs]
        p_logits = logits_of(teacher[rows], teacher_weight)
        results.put(
            rows, *draft_laws.label_losses(q_parts, p_logits, labels[rows], columns, renormalised)
        )
        del q_parts, p_logits  # before the next ones are made
    ce, l1 = results.vectors
    return ce, l1


@chunked_label_losses.register_fake
def _(student: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    a, b = (student.new_empty(student.shape[0], dtype=accumulator(student.dtype)) for _ in range(2))
    return a, b


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.renormalised = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_ce: Tensor | None, d_l1: Tensor | None) -> tuple[Tensor | None, ...]:
    student, student_weight, teacher, teacher_weight, labels, extra, extra_weight, columns = (
        ctx.saved_tensors
    )
    num_rows = labels.shape[0]
    work = accumulator(student.dtype)
    d_ce, d_l1 = (student.new_zeros(num_rows, dtype=work) if d is None else d for d in (d_ce, d_l1))
    at, student, teacher, labels, d_ce, d_l1, *more = _live(
        labels, student, teacher, extra, d_ce, d_l1
    )
    labels = _places(labels, columns, teacher_weight)
    d_ce = torch.where(labels >= 0, d_ce, 0.0)
    with_law = bool((d_l1 != 0).any())
    pairs = _pairs(student, student_weight, more, extra_weight)
    needed = [(ctx.needs_input_grad[0], ctx.needs_input_grad[1])]
    needed += [(ctx.needs_input_grad[5], ctx.needs_input_grad[6])] * (len(pairs) - 1)
    d_rows: list[list[Tensor]] = [[] for _ in pairs]
    d_weights: list[Tensor | None] = [None for _ in pairs]
    for rows in full_law_chunks(student.shape[0], teacher_weight.shape[0], student.device):
        q_parts = [logits_of(x[rows], weight) for x, weight in pairs]
        p_logits = logits_of(teacher[rows], teacher_weight) if with_law else None
        grad = draft_laws.label_gradient(
            q_parts, p_logits, labels[rows], columns, ctx.renormalised, d_ce[rows], d_l1[rows]
        )
        for i, (x, weight) in enumerate(pairs):
            if needed[i][0]:
                d_rows[i].append(grad @ weight)
            if needed[i][1]:
                d_weights[i] = plus_product(d_weights[i], grad.t(), x[rows])
        del q_parts, p_logits, grad  # before the next ones are made
    found: list[Tensor | None] = []
    for i, (x, weight) in enumerate(pairs):
        found.append(put_rows(joined(d_rows[i], x), at, num_rows) if needed[i][0] else None)
        found.append(whole(d_weights[i], weight) if needed[i][1] else None)
    return found[0], found[1], None, None, None, *(found[2:] or (None, None)), None, None


chunked_label_losses.register_autograd(_backward, setup_context=_setup)


def _places(labels: Tensor, columns: Tensor | None, weight: Tensor) -> Tensor:
    return labels if columns is None else places(labels, columns, weight.shape[0])


def _live(
    labels: Tensor, student: Tensor, teacher: Tensor, extra: Tensor | None, *others: Tensor
) -> tuple[Any, ...]:
    more = [] if extra is None else [extra]
    return pick_rows(labels >= 0, student, teacher, labels, *others, *more)


def _pairs(
    student: Tensor, student_weight: Tensor, more: Sequence[Tensor], extra_weight: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    pairs = [(student, student_weight)]
    if more and extra_weight is not None:
        pairs.append((more[0], extra_weight))
    return pairs

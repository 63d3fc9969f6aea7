"""How far a draft's law, over all tokens or some of them, is from the target's, as numbers to build losses from.

Logits [R, V] never exist: a chunk of rows spans the vocabulary, and the backward computes it again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.operator import operator

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
        q_logits = logits_of(student[rows], student_weight)
        p_logits = logits_of(teacher[rows], teacher_weight)
        results.put(rows, *draft_laws.law_losses(q_logits, p_logits, columns))
        del q_logits, p_logits  # before the next ones are made
    ce, overlap, entropy, known = results.vectors
    return ce, overlap, entropy, known


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
        q_logits = logits_of(student[rows], student_weight)
        p_logits = logits_of(teacher[rows], teacher_weight)
        grad = draft_laws.law_gradient(q_logits, p_logits, columns, d_ce[rows], d_overlap[rows])
        if needs_student:
            d_rows.append(grad @ student_weight)
        if needs_weight:
            d_weight = plus_product(d_weight, grad.t(), student[rows])
        del q_logits, p_logits, grad  # before the next ones are made
    return (
        put_rows(joined(d_rows, student), at, live.shape[0]) if needs_student else None,
        whole(d_weight, student_weight) if needs_weight else None,
        None, None, None, None,
    )  # fmt: skip


chunked_law_losses.register_autograd(_backward, setup_context=_setup)

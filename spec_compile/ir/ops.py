"""Declared operators: one node each in a captured graph, a plain eager body everywhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.errors import ConfigError

from . import reference
from .arguments import check_attention, numbers
from .dtypes import accumulator
from .meta import user_line
from .reference import Branch
from .tracing import is_capturing


def branch_attention(
    q: Tensor,
    k_main: Tensor,
    v_main: Tensor,
    branches: Sequence[Branch] = (),
    *,
    q_limit: Tensor,
    q_document: Tensor,
    k_document: Tensor,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to a causal main part and to branches with one softmax.

    Args:
        q: [R, Hq, D].
        k_main: [T, Hkv, D]; key ``s`` is visible to row ``r`` iff ``k_document[s] == q_document[r]``,
            ``s < q_limit[r]``, and ``s >= q_limit[r] - window`` when a window is given.
        v_main: [T, Hkv, Dv].
        branches: ``(k [S, Hkv, D], v [S, Hkv, Dv], k_group [S], q_group [R])``; key ``j`` is visible iff
            ``k_group[j] == q_group[r]``. Never windowed.
        q_limit: int64 [R], in rows of the packed row.
        q_document: int64 [R].
        k_document: int64 [T].
        scale: factor on the scores; None means ``D ** -0.5``.
        window: how many main keys below the limit are visible.
        sinks: [Hq]; one more logit per head that enters the denominator only.

    Returns:
        [R, Hq, Dv]; a row that sees no key is exactly 0 with zero gradients.

    Raises:
        ConfigError: shapes do not fit together, numbers of rows or documents are no integers, the scale is not
            finite, or the window is not a positive int; names the line that runs.
    """
    check_attention(q, k_main, v_main, branches, sinks, scale=scale, window=window)
    q_limit = numbers("q_limit", q_limit, q, "q")
    q_document = numbers("q_document", q_document, q, "q")
    k_document = numbers("k_document", k_document, k_main, "k_main")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not is_capturing():
        return reference.branch_attention(
            q,
            k_main,
            v_main,
            branches,
            q_limit=q_limit,
            q_document=q_document,
            k_document=k_document,
            scale=scale,
            window=window,
            sinks=sinks,
        )
    columns: list[list[Tensor]] = [list(c) for c in zip(*branches, strict=True)] or [[], [], [], []]
    out: Tensor = declared_branch_attention(
        q,
        k_main,
        v_main,
        *columns,
        q_limit,
        q_document,
        k_document,
        sinks,
        scale,
        -1 if window is None else window,
    )
    return out


def shift(x: Tensor, k: int, document: Tensor) -> Tensor:
    """``y[t] = x[t + k]`` when both rows are of one document, else 0 / False.

    Args:
        x: [T, ...].
        k: rows to look ahead; negative looks back.
        document: int64 [T].
    """
    if isinstance(k, bool) or not isinstance(k, int):
        raise ConfigError(f"{user_line()}\n  shift needs an int number of rows, found {k!r}")
    document = numbers("document", document, x, "x")
    return declared_shift(x, k, document) if is_capturing() else reference.shift(x, k, document)


def soft_cross_entropy(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Per row: cross-entropy of the student's law to the teacher's, and sum of min(p, q).

    Compiled, it runs in chunks of tokens x vocabulary: logits [T, V] never exist.

    Args:
        student: [T, D], normed hidden states of the draft.
        student_weight: [V, D].
        teacher: [T, D_t], hidden states of the target after its final norm.
        teacher_weight: [V, D_t].

    Returns:
        Two vectors [T], fp32 (fp64 for fp64). No gradient reaches the teacher or passes the second one.
    """
    op = declared_soft_cross_entropy if is_capturing() else reference.soft_cross_entropy
    loss, overlap = op(student, student_weight, teacher, teacher_weight)
    return loss, overlap


def label_losses(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    extra: Tensor | None = None,
    extra_weight: Tensor | None = None,
    columns: Tensor | None = None,
    renormalised: bool = False,
) -> tuple[Tensor, Tensor]:
    """Per row: cross-entropy of the student's law to a label, and its L1 distance from the teacher's law.

    Compiled, it runs in chunks of rows: logits [R, V] never exist.

    Args:
        student: [R, D], normed hidden states of the draft.
        student_weight: [V_d, D].
        teacher: [R, D_t], hidden states of the target after its final norm.
        teacher_weight: [V, D_t].
        labels: int64 [R], the target's ids; rows with a negative label give 0 for both, and no gradient.
        extra: [R, r], or None; ``extra @ extra_weight.T`` is added to the student's logits.
        extra_weight: [V_d, r], or None.
        columns: int64 [V_d], the target's ids of the draft's tokens; None: all of them, in order. A label that
            is none of them gives 0 for the first.
        renormalised: the teacher's law is renormalised over the columns; else its other tokens count in the
            distance, where the student's law is 0.

    Returns:
        Two vectors [R], fp32 (fp64 for fp64); the second, sum of |q - p|, is in 0..2. No gradient reaches the
        teacher.
    """
    op = declared_label_losses if is_capturing() else reference.label_losses
    ce, l1 = op(
        student, student_weight, teacher, teacher_weight, labels, extra, extra_weight,
        columns, renormalised,
    )  # fmt: skip
    return ce, l1


def law_losses(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    columns: Tensor | None,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row, what losses between a draft's law q and the target's p are made of.

    Compiled, it runs in chunks of rows: logits [R, V] never exist.

    Args:
        student: [R, D], normed hidden states of the draft.
        student_weight: [V_d, D].
        teacher: [R, D_t], hidden states of the target after its final norm.
        teacher_weight: [V, D_t].
        columns: int64 [V_d], the target's ids of the draft's tokens; None: all of them, in order.
        live: bool [R]; other rows give 0 for everything, and no gradient.

    Returns:
        Four vectors [R], fp32 (fp64 for fp64): cross-entropy of q to p renormalised over the columns; sum of
        min(p, q) over the columns, p over all tokens; entropy of the renormalised p; 1 where the likeliest
        token under p is a column. The first two carry gradients; none reaches the teacher.
    """
    op = declared_law_losses if is_capturing() else reference.law_losses
    ce, overlap, entropy, known = op(
        student, student_weight, teacher, teacher_weight, columns, live
    )
    return ce, overlap, entropy, known


@torch.library.custom_op("spec_compile::branch_attention", mutates_args=())
def declared_branch_attention(
    q: Tensor,
    k_main: Tensor,
    v_main: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    k_group: list[Tensor],
    q_group: list[Tensor],
    q_limit: Tensor,
    q_document: Tensor,
    k_document: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    """Capture form of `branch_attention`; ``window`` -1 means none."""
    branches = list(zip(branch_k, branch_v, k_group, q_group, strict=True))
    return reference.branch_attention(
        q,
        k_main,
        v_main,
        branches,
        q_limit=q_limit,
        q_document=q_document,
        k_document=k_document,
        scale=scale,
        window=None if window < 0 else window,
        sinks=sinks,
    ).contiguous()


@declared_branch_attention.register_fake
def _(q: Tensor, k_main: Tensor, v_main: Tensor, *rest: object) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v_main.shape[2]))


@torch.library.custom_op("spec_compile::shift", mutates_args=())
def declared_shift(x: Tensor, k: int, document: Tensor) -> Tensor:
    """Capture form of `shift`."""
    return reference.shift(x, k, document)


@declared_shift.register_fake
def _(x: Tensor, k: int, document: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("spec_compile::row_shift", mutates_args=())
def declared_row_shift(x: Tensor, k: int, ends: str, value: float) -> Tensor:
    """``y[t] = x[t + k]`` in the packed row, over documents: what roll, slice + pad and slice + cat are.

    Args:
        x: [T, ...].
        k: rows to look ahead; negative looks back.
        ends: what rows get whose source is no row: "fill" the value, "roll" row ``(t + k) mod T``, "join" the
            same but for ``|k| > T``, where nothing moves (``cat([x[k:], x[:k]])``).
        value: for "fill".
    """
    return reference.row_shift(x, k, ends, value)


@declared_row_shift.register_fake
def _(x: Tensor, k: int, ends: str, value: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("spec_compile::token_logprobs", mutates_args=())
def declared_token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Capture form of the policy's log-probs and entropies; see `reference.token_logprobs`."""
    return reference.token_logprobs(hidden, weight, labels, temperature)


@torch.library.custom_op("spec_compile::soft_cross_entropy", mutates_args=())
def declared_soft_cross_entropy(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Capture form of `soft_cross_entropy`."""
    return reference.soft_cross_entropy(student, student_weight, teacher, teacher_weight)


@torch.library.custom_op("spec_compile::label_losses", mutates_args=())
def declared_label_losses(
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
    """Capture form of `label_losses`."""
    return reference.label_losses(
        student, student_weight, teacher, teacher_weight, labels, extra, extra_weight,
        columns, renormalised,
    )  # fmt: skip


@torch.library.custom_op("spec_compile::law_losses", mutates_args=())
def declared_law_losses(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    columns: Tensor | None,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Capture form of `law_losses`."""
    return reference.law_losses(student, student_weight, teacher, teacher_weight, columns, live)


@declared_law_losses.register_fake
def _(rows: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (*_two_a_row(rows), *_two_a_row(rows))
    return a, b, c, d


def _two_a_row(rows: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Fake of every operator here that gives two numbers a row."""
    shape, dtype = rows.shape[:1], accumulator(rows.dtype)
    return rows.new_empty(shape, dtype=dtype), rows.new_empty(shape, dtype=dtype)


for _op in (declared_token_logprobs, declared_soft_cross_entropy, declared_label_losses):
    _op.register_fake(_two_a_row)


@torch.library.custom_op("spec_compile::boundary", mutates_args=())
def boundary(x: Tensor, layer: int) -> Tensor:
    """Mark the residual stream after ``layer`` layers during capture; erased by the first passes."""
    return x.clone()


@boundary.register_fake
def _(x: Tensor, layer: int) -> Tensor:
    return torch.empty_like(x)


boundary.register_autograd(lambda ctx, grad: (grad, None))

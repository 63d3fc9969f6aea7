"""Losses over the vocabulary from hidden states and head weights, in chunks of tokens x vocabulary.

Logits [T, V] never exist. Sums run in fp32 (fp64 for fp64); products run in the dtype of the hidden
states. The backward computes each chunk of logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.operator import operator

from .logit_chunks import (
    RowValues,
    full_law_chunks,
    joined,
    logits_of,
    pick_rows,
    plus_product,
    put_rows,
    token_chunks,
    vocabulary_chunks,
    whole,
)
from .logit_kernels import label_gradient, label_sweep_, soft_gradient, soft_sweep


@operator("chunked_token_logprobs")
def chunked_token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each label and entropy (nats) of softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [T, D].
        weight: [V, D].
        labels: int64 [T]; rows with a negative label give 0 for both and no gradient.
        temperature: scalar tensor, without gradient.

    Returns:
        logprobs [T], entropy [T], and the log-sum-exp [T] of the scaled logits, which carries no
        gradient; fp32, or fp64 for fp64.
    """
    heat = _heat(temperature, hidden)
    state = hidden.new_empty(4, hidden.shape[0], dtype=heat.dtype)
    for rows in token_chunks(hidden.shape[0], hidden.device):
        for words in vocabulary_chunks(rows.stop - rows.start, weight.shape[0], hidden.device):
            logits = logits_of(hidden[rows], weight[words])
            label_sweep_(state[:, rows], logits, labels[rows], heat, words.start)
            del logits  # before the next ones are made
    top, total, moment, picked = state
    log_total = total.log()
    lse, live = top + log_total, labels >= 0
    entropy = torch.where(live, log_total - moment / total, 0.0)
    return torch.where(live, picked - lse, 0.0), entropy, lse


@chunked_token_logprobs.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (hidden.new_empty(hidden.shape[0], dtype=accumulator(hidden.dtype)) for _ in range(3))
    return a, b, c


def _heat(temperature: Tensor, like: Tensor) -> Tensor:
    return temperature.to(device=like.device, dtype=accumulator(like.dtype))


def _logprobs_setup(
    ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    hidden, weight, labels, temperature = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels, temperature, output[1], output[2])


def _logprobs_backward(
    ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None]:
    if d_logprob is None and d_entropy is None:
        return None, None, None, None
    hidden, weight, labels, temperature, entropy, lse = ctx.saved_tensors
    heat = _heat(temperature, hidden)
    # an entropy that no loss reads has no gradient, and its part is then left out
    with_entropy = d_entropy is not None
    d_logprob = torch.zeros_like(lse) if d_logprob is None else d_logprob
    d_entropy = torch.zeros_like(lse) if d_entropy is None else d_entropy
    live = (labels >= 0) & ((d_logprob != 0) | (d_entropy != 0))  # prompts, for one, are not
    at, hidden, labels, entropy, lse, d_logprob, d_entropy = pick_rows(
        live, hidden, labels, entropy, lse, d_logprob / heat, d_entropy / heat
    )
    grads = _HeadGrads(hidden, weight, ctx.needs_input_grad)
    for rows, words in grads.chunks():
        logits = logits_of(hidden[rows], weight[words])
        of_entropy = (entropy[rows], d_entropy[rows]) if with_entropy else None
        grad = label_gradient(
            logits, labels[rows], heat, lse[rows], d_logprob[rows], of_entropy, words.start
        )
        grads.add(rows, words, grad)
        del logits, grad  # before the next ones are made
    return *grads.result(at, len(live)), None, None


chunked_token_logprobs.register_autograd(_logprobs_backward, setup_context=_logprobs_setup)


@operator("chunked_soft_cross_entropy")
def chunked_soft_cross_entropy(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    needed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: cross-entropy of the student's law to the teacher's, and sum of min(p, q).

    Args:
        student: [T, D].
        student_weight: [V, D].
        teacher: [T, D_t]; no gradient reaches it.
        teacher_weight: [V, D_t]; no gradient reaches it.
        needed: bool [T]; other rows give 0 for everything and cost nothing. None: all rows.

    Returns:
        loss [T], overlap [T], and both log-sum-exps [T], student's first; fp32, or fp64 for fp64.
        Only the loss carries a gradient.
    """
    num_rows = student.shape[0]
    at, student, teacher = pick_rows(needed, student, teacher, comes_again=True)
    results = RowValues(4, at, num_rows, student)
    # the overlap needs both laws normalised: a chunk spans the vocabulary, so one sweep is enough
    for rows in full_law_chunks(student.shape[0], student_weight.shape[0], student.device):
        q_logits = logits_of(student[rows], student_weight)
        p_logits = logits_of(teacher[rows], teacher_weight)
        results.put(rows, *soft_sweep(q_logits, p_logits))
        del q_logits, p_logits  # before the next ones are made
    loss, overlap, q_lse, p_lse = results.vectors
    return loss, overlap, q_lse, p_lse


@chunked_soft_cross_entropy.register_fake
def _(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    needed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (
        student.new_empty(student.shape[0], dtype=accumulator(student.dtype)) for _ in range(4)
    )
    return a, b, c, d


def _soft_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, overlap, student_lse, teacher_lse = output
    ctx.mark_non_differentiable(overlap, student_lse, teacher_lse)
    ctx.save_for_backward(*inputs, student_lse, teacher_lse)


def _soft_backward(
    ctx: Any, d_loss: Tensor, *unused: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    student, student_weight, teacher, teacher_weight, needed, q_lse, p_lse = ctx.saved_tensors
    num_rows = student.shape[0]
    # the forward's rows, whose number the host knows
    live = d_loss != 0 if needed is None else needed
    at, student, teacher, q_lse, p_lse, d_loss = pick_rows(
        live, student, teacher, q_lse, p_lse, d_loss, comes_again=needed is not None
    )
    grads = _HeadGrads(student, student_weight, ctx.needs_input_grad)
    for rows, words in grads.chunks():
        q_logits = logits_of(student[rows], student_weight[words])
        p_logits = logits_of(teacher[rows], teacher_weight[words])
        grad = soft_gradient(q_logits, p_logits, q_lse[rows], p_lse[rows], d_loss[rows])
        grads.add(rows, words, grad)
        del q_logits, p_logits, grad  # before the next ones are made
    return *grads.result(at, num_rows), None, None, None


chunked_soft_cross_entropy.register_autograd(_soft_backward, setup_context=_soft_setup)


class _HeadGrads:
    """Gradients of hidden states and head weight, from chunks of the logits' gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, needed: tuple[bool, ...]) -> None:
        self.hidden, self.weight = hidden, weight
        self.needs_hidden, self.needs_weight = needed[:2]
        self._hidden: dict[int, Tensor] = {}
        """By first row."""
        self._weight: Tensor | None = None
        self._part: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield (rows, words), vocabulary outermost: one part of the weight's gradient at a time."""
        num_tokens, num_words = self.hidden.shape[0], self.weight.shape[0]
        for words in vocabulary_chunks(num_tokens, num_words, self.hidden.device):
            for rows in token_chunks(num_tokens, self.hidden.device):
                yield rows, words
            if self._part is not None and len(self._part) == num_words:
                self._weight = self._part.to(self.weight.dtype)
            elif self._part is not None:
                if self._weight is None:
                    self._weight = torch.empty_like(self.weight)
                self._weight[words] = self._part
            self._part = None

    def add(self, rows: slice, words: slice, grad: Tensor) -> None:
        """Take the gradient of one chunk of logits, [rows, words], in the dtype of the hidden states."""
        if self.needs_hidden:
            before = self._hidden.get(rows.start)
            self._hidden[rows.start] = plus_product(before, grad, self.weight[words])
        if self.needs_weight:
            self._part = plus_product(self._part, grad.t(), self.hidden[rows])

    def result(self, at: Tensor | None, num_rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients in their own dtypes, the hidden states' spread from the rows ``at``."""
        d_hidden = d_weight = None
        if self.needs_hidden:
            d_hidden = put_rows(joined(list(self._hidden.values()), self.hidden), at, num_rows)
        if self.needs_weight:
            d_weight = whole(self._weight, self.weight)
        return d_hidden, d_weight

"""Losses of a draft against its teacher's law."""

from __future__ import annotations

from torch import Tensor

from spec_compile.ir.ops import soft_cross_entropy


def teacher_losses(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """Per row: "cross_entropy" to the teacher's law or "kl" from it, and sum of min(p, q).

    Args:
        student: [T, D], normed hidden states of the draft.
        student_weight: [V, D].
        teacher: [T, D_t], hidden states of the target after its final norm.
        teacher_weight: [V, D_t].
        kind: "kl" is the cross-entropy less the teacher's own entropy, so its gradient is the same.
    """
    loss, overlap = soft_cross_entropy(student, student_weight, teacher, teacher_weight)
    if kind == "kl":
        entropy, _ = soft_cross_entropy(teacher, teacher_weight, teacher, teacher_weight)
        loss = loss - entropy.detach()
    return loss, overlap

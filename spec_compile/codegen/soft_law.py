"""Generated kernels over the logits of two laws: a draft's cross-entropy to its target's law, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .kernel import TRITON_TYPES, Kernel
from .row_kernel import BLOCK, make_row_kernel


@dataclass(frozen=True, kw_only=True)
class SoftLawShape:
    """What both kernels are generated for."""

    q_dtype: str
    """Of the student's logits, and of their gradient."""
    p_dtype: str
    """Of the target's."""
    block: int = BLOCK

    @property
    def work_dtype(self) -> str:
        """Dtype of sums, log-sum-exps and losses."""
        return "float64" if self.q_dtype == "float64" else "float32"

    def signature(self, name: str) -> dict[str, str]:
        """Triton type of every argument of the kernel ``name``, in order."""
        work = "*" + TRITON_TYPES[self.work_dtype]
        rows = {
            "soft_sweep": ("loss", "overlap", "q_lse", "p_lse"),
            "soft_gradient": ("q_lse", "p_lse", "d_loss"),
        }[name]
        return {
            "q_ptr": "*" + TRITON_TYPES[self.q_dtype],
            "p_ptr": "*" + TRITON_TYPES[self.p_dtype],
            **{f"{row}_ptr": work for row in rows},
            "num_words": "i64",
        }


@functools.cache
def soft_law_kernel(shape: SoftLawShape, name: str, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import the kernel ``name``, "soft_sweep" or "soft_gradient"."""
    return make_row_kernel("soft_law.py.jinja", name, shape, directory)


def launch_soft_sweep(
    shape: SoftLawShape, q_logits: Tensor, p_logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare q = softmax(q_logits) with p = softmax(p_logits), row by row.

    Args:
        shape: describes both.
        q_logits: [R, V], contiguous.
        p_logits: [R, V], contiguous.

    Returns:
        Cross-entropy of q to p, sum of min(p, q), and both log-sum-exps, q's first; each [R].
    """
    work = getattr(torch, shape.work_dtype)
    a, b, c, d = q_logits.new_empty(4, q_logits.shape[0], dtype=work)
    soft_law_kernel(shape, "soft_sweep").launch(
        q_logits.shape[0], q_logits, p_logits, a, b, c, d, q_logits.shape[1]
    )
    return a, b, c, d


def launch_soft_gradient(
    shape: SoftLawShape, q_logits: Tensor, p_logits: Tensor, rows: Sequence[Tensor]
) -> None:
    """Overwrite ``q_logits`` [R, V] by d_loss * (q - p).

    Args:
        shape: describes both.
        q_logits: contiguous.
        p_logits: [R, V], contiguous.
        rows: both log-sum-exps, q's first, and d_loss, each [R].
    """
    soft_law_kernel(shape, "soft_gradient").launch(
        q_logits.shape[0], q_logits, p_logits, *(x.contiguous() for x in rows), q_logits.shape[1]
    )

"""Generated kernels over a chunk of logits and its labels: log-probs and entropy in one sweep, and their gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .kernel import TRITON_TYPES, Kernel
from .row_kernel import BLOCK, make_row_kernel


@dataclass(frozen=True, kw_only=True)
class LabelLawShape:
    """What both kernels are generated for."""

    dtype: str
    """Of the logits, and of their gradient."""
    with_entropy: bool = True
    """Whether the entropy has a gradient."""
    block: int = BLOCK

    @property
    def work_dtype(self) -> str:
        """Dtype of sums, log-sum-exps and their gradients."""
        return "float64" if self.dtype == "float64" else "float32"

    def signature(self, name: str) -> dict[str, str]:
        """Triton type of every argument of the kernel ``name``, in order."""
        work = "*" + TRITON_TYPES[self.work_dtype]
        if name == "label_sweep":
            rows = ("top", "total", "moment", "picked")
        else:
            rows = ("lse", "d_logprob", *(("entropy", "d_entropy") if self.with_entropy else ()))
        return {
            "logits_ptr": "*" + TRITON_TYPES[self.dtype],
            "labels_ptr": "*i64",
            "heat_ptr": work,
            **{f"{row}_ptr": work for row in rows},
            "first_word": "i64",
            "num_words": "i64",
        }


@functools.cache
def label_law_kernel(shape: LabelLawShape, name: str, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import the kernel ``name``, "label_sweep" or "label_gradient"."""
    return make_row_kernel("label_law.py.jinja", name, shape, directory)


def launch_label_sweep(
    shape: LabelLawShape, logits: Tensor, labels: Tensor, heat: Tensor, state: Tensor, first_word: int,
) -> None:  # fmt: skip
    """Take ``logits`` [R, W], contiguous, of the words from ``first_word`` on, into the running sums.

    Args:
        shape: describes all tensors.
        logits: read only.
        labels: int64 [R], words of the whole vocabulary, or negative.
        heat: scalar tensor.
        state: four vectors of R contiguous numbers; maximum, sum of exponentials and their first moment, and
            the label's logit, all of logits / heat and the first three relative to the maximum. What they
            hold before the first word is ignored.
        first_word: number of the chunk's first word; chunks come in the order of the vocabulary.
    """
    label_law_kernel(shape, "label_sweep").launch(
        logits.shape[0],
        logits,
        labels.contiguous(),
        heat,
        *state.unbind(),
        first_word,
        logits.shape[1],
    )


def launch_label_gradient(
    shape: LabelLawShape, logits: Tensor, labels: Tensor, heat: Tensor, rows: tuple[Tensor, ...],
    first_word: int,
) -> None:  # fmt: skip
    """Overwrite ``logits`` [R, W] by d_logprob * d logprob / dx + d_entropy * d entropy / dx, where x = logits / heat.

    Args:
        shape: describes all tensors.
        logits: contiguous.
        labels: int64 [R].
        heat: scalar tensor.
        rows: lse, d_logprob, and entropy, d_entropy if the shape says so, each [R].
        first_word: number of the chunk's first word.
    """
    labels, *vectors = (x.contiguous() for x in (labels, *rows))
    label_law_kernel(shape, "label_gradient").launch(
        logits.shape[0], logits, labels, heat, *vectors, first_word, logits.shape[1]
    )

"""Generated kernels for losses of a draft's law whose tokens may be some of the target's, or have a label."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .kernel import TRITON_TYPES, Kernel
from .row_kernel import BLOCK, make_row_kernel

_SIGN = "(tl.where(q > p, 1.0, 0.0) - tl.where(q < p, 1.0, 0.0))"
"""d |q - p| / dq."""
_SIDE = "tl.where(p > q, 1.0, tl.where(p == q, 0.5, 0.0))"
"""d min(p, q) / dq."""
_PART = "tl.exp(p_logit - p_lse)"
"""p normalised over the columns."""


@dataclass(frozen=True, kw_only=True)
class DraftLawShape:
    """What a kernel is generated for."""

    q_dtype: str
    """Of the student's logits, and of their gradient."""
    p_dtype: str = ""
    """Of the target's; empty: the kernel needs none."""
    extra_dtype: str = ""
    """Of logits that are added to the student's; empty: none are."""
    has_columns: bool = False
    """Whether the student's tokens are some of the target's."""
    renormalised: bool = False
    """With columns, for labels: whether p is compared after its renormalisation over them."""
    block: int = BLOCK

    @property
    def work_dtype(self) -> str:
        """Dtype of sums and losses."""
        return "float64" if self.q_dtype == "float64" else "float32"

    @property
    def needs_whole(self) -> bool:
        """Whether p is normalised over words that are no columns."""
        return bool(self.p_dtype) and self.has_columns and not self.renormalised

    def signature(self, name: str) -> dict[str, str]:
        """Triton type of every argument of the kernel ``name``, in order."""
        types = {"q_ptr": self.q_dtype, "extra_ptr": self.extra_dtype, "p_ptr": self.p_dtype}
        found = {ptr: "*" + TRITON_TYPES[dtype] for ptr, dtype in types.items() if dtype}
        if self.p_dtype and self.has_columns:
            found["columns_ptr"] = "*i64"
        work = "*" + TRITON_TYPES[self.work_dtype]
        for vector in _vectors(self, name):
            found[f"{vector}_ptr"] = "*i64" if vector == "label" else work
        counts = ("num_columns", *(("num_words",) if self.p_dtype else ()))
        return found | dict.fromkeys(counts, "i64")


def _vectors(shape: DraftLawShape, name: str) -> tuple[str, ...]:
    """Numbers a row that a kernel reads or writes."""
    if name == "draft_label_gradient":
        return ("label", "d_ce", "d_distance") if shape.p_dtype else ("label", "d_ce")
    return {
        "draft_label_sweep": ("label", "ce", "distance"),
        "draft_law_sweep": ("ce", "overlap", "entropy", "known"),
        "draft_law_gradient": ("d_ce", "d_overlap"),
    }[name]


def _formulas(shape: DraftLawShape, name: str) -> dict[str, object]:
    """Sums over the columns, and what becomes of them: results a row, or terms of the gradient."""
    whole = shape.needs_whole
    if name == "draft_label_sweep":
        sums = {"distance": "tl.abs(q - p)", **({"seen": "p"} if whole else {})}
        results = {
            "ce": "tl.where(label >= 0, q_lse - picked, 0.0)",
            "distance": "distance + (1.0 - seen)" if whole else "distance",
        }
        return {"sums": sums, "results": results}
    if name == "draft_label_gradient":
        terms = ["q * d_ce", "tl.where(word == label, -d_ce, 0.0)"]
        if not shape.p_dtype:
            return {"sums": {}, "terms": terms}
        terms.append(f"q * ({_SIGN} - lean) * d_distance")
        return {"sums": {"lean": f"{_SIGN} * q"}, "terms": terms}
    if name == "draft_law_sweep":
        sums = {
            # of q - top: q_lse minus the mean logit would lose the digits that both share
            "mean": f"tl.where(inside, {_PART} * (q_logit - q_top), 0.0)",
            "entropy": f"tl.where(inside, {_PART} * (p_lse - p_logit), 0.0)",
            "overlap": "tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)",
        }
        # a sum with a NaN in it is not above 0, though a maximum passes over NaNs
        known = "(p_top >= top) & (total > 0)" if whole else "p_total > 0"
        results = {
            "ce": "tl.log(q_total) - mean", "overlap": "overlap", "entropy": "entropy",
            "known": f"tl.where({known}, 1.0, 0.0)",
        }  # fmt: skip
        return {"sums": sums, "results": results}
    terms = [f"(q - {_PART}) * d_ce", f"q * ({_SIDE} - lean) * d_overlap"]
    return {"sums": {"lean": f"{_SIDE} * q"}, "terms": terms}


@functools.cache
def draft_law_kernel(shape: DraftLawShape, name: str, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import a kernel: "draft_label_sweep", "draft_law_sweep", or a "_gradient"."""
    vectors = _vectors(shape, name)
    return make_row_kernel(
        "draft_law.py.jinja", name, shape, directory,
        q_args="q_row, extra_row" if shape.extra_dtype else "q_row",
        p_args="p_row, columns_ptr" if shape.has_columns else "p_row",
        has_extra=bool(shape.extra_dtype),
        needs_p=bool(shape.p_dtype),
        needs_part=bool(shape.p_dtype) and (not shape.needs_whole or "label" not in vectors),
        needs_whole=shape.needs_whole,
        gradient=name.endswith("_gradient"),
        has_labels="label" in vectors,
        vectors=vectors,
        **_formulas(shape, name),
    )  # fmt: skip


def launch_draft_sweep(
    shape: DraftLawShape, name: str, logits: Sequence[Tensor], columns: Tensor | None,
    labels: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Return the vectors [R] that the kernel ``name`` computes.

    Args:
        shape: describes all tensors.
        name: "draft_label_sweep" or "draft_law_sweep".
        logits: the student's [R, V_d], what is added to it, the target's [R, V]; those that there are,
            contiguous.
        columns: int64 [V_d], words of the target, or None.
        labels: int64 [R], columns of the student, or negative; None for a kernel without.
    """
    q = logits[0]
    given = [] if labels is None else [labels]
    number = len(_vectors(shape, name)) - len(given)
    out = list(q.new_empty(number, len(q), dtype=getattr(torch, shape.work_dtype)).unbind())
    _launch(shape, name, logits, columns, [*given, *out])
    return out


def launch_draft_gradient(
    shape: DraftLawShape, name: str, logits: Sequence[Tensor], columns: Tensor | None,
    vectors: Sequence[Tensor],
) -> None:  # fmt: skip
    """Overwrite the student's logits by their gradient; arguments as of `launch_draft_sweep`.

    ``vectors`` are labels, if the kernel has some, and gradients of what the sweep gives, [R].
    """
    _launch(shape, name, logits, columns, vectors)


def _launch(
    shape: DraftLawShape, name: str, logits: Sequence[Tensor], columns: Tensor | None,
    vectors: Sequence[Tensor],
) -> None:  # fmt: skip
    counts = [logits[0].shape[1], *([logits[-1].shape[1]] if shape.p_dtype else [])]
    taken = [columns] if shape.p_dtype and columns is not None else []
    kernel = draft_law_kernel(shape, name)
    inputs = (x.contiguous() for x in (*taken, *vectors))
    kernel.launch(len(logits[0]), *logits, *inputs, *counts)

"""The generated kernel that joins partial attentions by their log-sum-exps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spec_compile.errors import ConfigError

from .kernel import TRITON_TYPES, Kernel, block_rows, load_kernel, padded, render


@dataclass(frozen=True, kw_only=True)
class MergeShape:
    """What one merge kernel is generated for.

    Raises:
        ConfigError: nothing to merge, or head counts that do not divide.
    """

    partial_dtypes: tuple[str, ...]
    """Dtype of each partial's output, such as "bfloat16"."""
    num_heads: int
    value_dim: int
    out_dtype: str
    num_diagonals: int = 0
    """Diagonal branches, whose scores the kernel computes itself."""
    num_key_heads: int = 1
    """Key heads of the diagonals."""
    head_dim: int = 0
    """Head dim of queries and diagonal keys."""
    diagonal_dtype: str = ""
    """Dtype of q and of diagonal keys and values."""
    sinks_dtype: str = ""
    """Empty: no sinks."""
    scale: float = 1.0
    """Factor on the scores of diagonals; a constant of the kernel, exact in every dtype."""

    def __post_init__(self) -> None:
        if not self.partial_dtypes and not self.num_diagonals:
            raise ConfigError("a merge needs at least one partial or diagonal branch; give one")
        if self.num_heads % self.num_key_heads:
            raise ConfigError(
                f"a merge needs num_heads to be a multiple of num_key_heads, found {self.num_heads} "
                f"and {self.num_key_heads}"
            )

    @property
    def num_partials(self) -> int:
        """Partials that come with an output and a log-sum-exp."""
        return len(self.partial_dtypes)

    @property
    def work_dtype(self) -> str:
        """Dtype of scores, sums and log-sum-exps."""
        return "float64" if self.out_dtype == "float64" else "float32"

    @property
    def rows(self) -> int:
        """Rows (token, head) that one program takes."""
        return block_rows(max(self.value_dim, self.head_dim))

    def signature(self) -> dict[str, str]:
        """Triton type of every argument of the kernel, in order."""
        work = "*" + TRITON_TYPES[self.work_dtype]
        types = {"out_ptr": "*" + TRITON_TYPES[self.out_dtype], "lse_ptr": work}
        for i, dtype in enumerate(self.partial_dtypes):
            types |= {f"out{i}_ptr": "*" + TRITON_TYPES[dtype], f"lse{i}_ptr": work}
        if self.num_diagonals:
            diagonal = "*" + TRITON_TYPES[self.diagonal_dtype]
            types["q_ptr"] = diagonal
            for i in range(self.num_diagonals):
                types |= {f"k{i}_ptr": diagonal, f"v{i}_ptr": diagonal}
        if self.sinks_dtype:
            types["sinks_ptr"] = "*" + TRITON_TYPES[self.sinks_dtype]
        return types | {"num_rows": "i64"}


def merge_source(shape: MergeShape) -> str:
    """Generated Python text of the kernel for ``shape``."""
    return render(
        "merge_partials.py.jinja",
        dataclasses.asdict(shape)
        | {
            "num_partials": shape.num_partials,
            "arguments": list(shape.signature()),
            "work": f"tl.{shape.work_dtype}",
            "rows": shape.rows,
            "value_block": padded(shape.value_dim),
            "head_block": padded(shape.head_dim),
            "group": shape.num_heads // shape.num_key_heads,
            "shape_text": repr(shape),
        },
    )


@functools.cache
def merge_kernel(shape: MergeShape, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import the kernel for ``shape``."""
    return load_kernel("merge_partials", merge_source(shape), directory)


def launch_merge(
    shape: MergeShape,
    partials: Sequence[tuple[Tensor, Tensor]],
    q: Tensor,
    diagonals: Sequence[tuple[Tensor, Tensor]],
    sinks: Tensor | None,
    directory: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge into (out [R, H, Dv] in ``out_dtype``, lse [R, H]).

    Args:
        shape: describes all tensors below.
        partials: (out [R, H, Dv], lse [R, H]) each; not read where lse is -inf or +inf.
        q: [R, H, D]; read for diagonals only.
        diagonals: (k [R, Hkv, D], v [R, Hkv, Dv]) each; key j belongs to row j.
        sinks: [H] or None.
        directory: where the generated file goes; None for the default.
    """
    num_tokens = q.shape[0]
    out = q.new_empty(
        (num_tokens, shape.num_heads, shape.value_dim), dtype=getattr(torch, shape.out_dtype)
    )
    lse = q.new_empty((num_tokens, shape.num_heads), dtype=getattr(torch, shape.work_dtype))
    inputs = [x for pair in partials for x in pair]
    if diagonals:
        inputs += [q, *(x for pair in diagonals for x in pair)]
    if sinks is not None:
        inputs.append(sinks)
    num_rows = num_tokens * shape.num_heads
    kernel = merge_kernel(shape, directory)
    kernel.launch(-(-num_rows // shape.rows), out, lse, *(x.contiguous() for x in inputs), num_rows)
    return out, lse

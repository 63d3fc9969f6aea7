"""The generated kernel for row sums of a product: the delta of attention's backward."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .kernel import TRITON_TYPES, Kernel, block_rows, dtype_name, load_kernel, padded, render


@dataclass(frozen=True)
class RowDotShape:
    """What the kernel is generated for."""

    dim: int
    x_dtype: str
    y_dtype: str

    @property
    def work_dtype(self) -> str:
        """Dtype of the sums."""
        return "float64" if self.x_dtype == "float64" else "float32"

    def signature(self) -> dict[str, str]:
        """Triton type of every argument of the kernel, in order."""
        names = {"out_ptr": self.work_dtype, "x_ptr": self.x_dtype, "y_ptr": self.y_dtype}
        return {k: "*" + TRITON_TYPES[v] for k, v in names.items()} | {"num_rows": "i64"}


@functools.cache
def row_dot_kernel(shape: RowDotShape, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import the kernel for ``shape``."""
    values = dataclasses.asdict(shape) | {
        "arguments": list(shape.signature()),
        "work": f"tl.{shape.work_dtype}",
        "rows": block_rows(shape.dim),
        "block": padded(shape.dim),
        "shape_text": repr(shape),
    }
    return load_kernel("row_dot", render("row_dot.py.jinja", values), directory)


def launch_row_dot(x: Tensor, y: Tensor, directory: Path | None = None) -> Tensor:
    """Return sums of ``x * y`` over the last dimension, in fp32 (fp64 for fp64).

    Args:
        x: [R, H, D], contiguous.
        y: like x.
        directory: where the generated file goes; None for the default.
    """
    shape = RowDotShape(x.shape[-1], dtype_name(x.dtype), dtype_name(y.dtype))
    out = x.new_empty(x.shape[:-1], dtype=getattr(torch, shape.work_dtype))
    num_programs = -(-out.numel() // block_rows(shape.dim))
    row_dot_kernel(shape, directory).launch(num_programs, out, x, y, out.numel())
    return out

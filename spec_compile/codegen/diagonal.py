"""The generated kernel for the backward of a diagonal branch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .kernel import TRITON_TYPES, Kernel, block_rows, load_kernel, padded, render


@dataclass(frozen=True, kw_only=True)
class DiagonalShape:
    """What one kernel is generated for."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    """Dtype of q, k, v and the gradient of the output, such as "bfloat16"."""
    scale: float
    """Factor on the scores; a constant of the kernel, exact in every dtype."""

    @property
    def work_dtype(self) -> str:
        """Dtype of scores, sums, lse and dq."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def rows(self) -> int:
        """Rows (token, key head) that one program takes."""
        return block_rows(max(self.value_dim, self.head_dim))

    def signature(self) -> dict[str, str]:
        """Triton type of every argument of the kernel, in order."""
        work, low = "*" + TRITON_TYPES[self.work_dtype], "*" + TRITON_TYPES[self.dtype]
        types = {"dq_ptr": work, "dk_ptr": low, "dv_ptr": low, "grad_ptr": low, "q_ptr": low}
        types |= {"k_ptr": low, "v_ptr": low, "lse_ptr": work, "delta_ptr": work}
        return types | {"num_rows": "i64"}


def diagonal_source(shape: DiagonalShape) -> str:
    """Generated Python text of the kernel for ``shape``."""
    return render(
        "diagonal_backward.py.jinja",
        dataclasses.asdict(shape)
        | {
            "arguments": list(shape.signature()),
            "work": f"tl.{shape.work_dtype}",
            "rows": shape.rows,
            "head_block": padded(shape.head_dim),
            "value_block": padded(shape.value_dim),
            "group": shape.num_heads // shape.num_key_heads,
            "shape_text": repr(shape),
        },
    )


@functools.cache
def diagonal_kernel(shape: DiagonalShape, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import the kernel for ``shape``."""
    return load_kernel("diagonal_backward", diagonal_source(shape), directory)


def launch_diagonal_backward(
    shape: DiagonalShape, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
    delta: Tensor, dq: Tensor, directory: Path | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add to ``dq`` and return (dk, dv) of one diagonal branch.

    Args:
        shape: describes all tensors below.
        grad_out: [R, H, Dv].
        q: [R, H, D].
        k: [R, Hkv, D].
        v: [R, Hkv, Dv].
        lse: [R, H] of the whole softmax, +inf where a row sees nothing.
        delta: [R, H], row sums of grad_out * out.
        dq: [R, H, D], contiguous, fp32 (fp64 for fp64).
        directory: where the generated file goes; None for the default.
    """
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    num_rows = k.shape[0] * shape.num_key_heads
    inputs = (x.contiguous() for x in (grad_out, q, k, v, lse, delta))
    kernel = diagonal_kernel(shape, directory)
    kernel.launch(-(-num_rows // shape.rows), dq, dk, dv, *inputs, num_rows)
    return dk, dv

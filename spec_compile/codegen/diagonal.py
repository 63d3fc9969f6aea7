"""The generated kernel for the backward of all diagonal branches of an attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .kernel import BLOCK_ELEMENTS, TRITON_TYPES, Kernel, block_rows, load_kernel, padded, render


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
    num_branches: int = 1

    @property
    def work_dtype(self) -> str:
        """Dtype of scores, sums and lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def rows(self) -> int:
        """Rows (token, key head) that one program takes; all query heads of each are held at once."""
        widest, group = max(self.value_dim, self.head_dim), self.num_heads // self.num_key_heads
        return block_rows(widest, BLOCK_ELEMENTS // group)

    def signature(self) -> dict[str, str]:
        """Triton type of every argument of the kernel, in order."""
        work, low = "*" + TRITON_TYPES[self.work_dtype], "*" + TRITON_TYPES[self.dtype]
        types = {"dq_ptr": low, "grad_ptr": low, "q_ptr": low, "lse_ptr": work, "delta_ptr": work}
        for i in range(self.num_branches):
            types |= {f"{name}{i}_ptr": low for name in ("k", "v", "dk", "dv")}
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
    shape: DiagonalShape, grad_out: Tensor, q: Tensor, lse: Tensor, delta: Tensor,
    branches: Sequence[tuple[Tensor, Tensor]], directory: Path | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:  # fmt: skip
    """Return dq [R, H, D], the sum over the branches, and (dk, dv) of each, in one launch.

    Args:
        shape: describes all tensors below.
        grad_out: [R, H, Dv].
        q: [R, H, D].
        lse: [R, H] of the whole softmax, +inf where a row sees nothing.
        delta: [R, H], row sums of grad_out * out.
        branches: (k [R, Hkv, D], v [R, Hkv, Dv]) each.
        directory: where the generated file goes; None for the default.
    """
    dq = q.new_empty(q.shape)
    grads = [(k.new_empty(k.shape), v.new_empty(v.shape)) for k, v in branches]
    inputs = [x.contiguous() for x in (grad_out, q, lse, delta)]
    for (k, v), pair in zip(branches, grads, strict=True):
        inputs += [k.contiguous(), v.contiguous(), *pair]
    num_rows = q.shape[0] * shape.num_key_heads
    kernel = diagonal_kernel(shape, directory)
    kernel.launch(-(-num_rows // shape.rows), dq, *inputs, num_rows)
    return dq, grads

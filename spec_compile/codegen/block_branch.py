"""The generated kernels of a branch in blocks: run i of the rows sees run i of the keys, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .kernel import TRITON_TYPES, Kernel, load_kernel, padded, render

LEAST = 16
"""Least rows and keys of a tile: what matrix instructions take."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What the kernels are generated for."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    """Dtype of q, k, v and of every gradient."""
    scale: float
    """Factor on the scores; a constant of the kernels."""
    rows: int
    """Query rows of one block."""
    keys: int
    """Keys of one block."""
    partial_dtypes: tuple[str, ...] = ()
    """Of the partials that the forward merges the branch with; not used backward."""
    sinks_dtype: str = ""
    """Empty: no sinks."""
    out_dtype: str = ""
    """Of the forward's result."""

    @property
    def work_dtype(self) -> str:
        """Dtype of scores, sums and log-sum-exps."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def blocks(self) -> int:
        """Whole blocks that one program takes."""
        return max(1, LEAST // max(self.rows, self.keys))

    def signature(self, kernel: str) -> dict[str, str]:
        """Triton type of every argument of "merge_block" or "block_backward", in order."""
        low, work = "*" + TRITON_TYPES[self.dtype], "*" + TRITON_TYPES[self.work_dtype]
        data = {"q_ptr": low, "k_ptr": low, "v_ptr": low}
        if kernel == "merge_block":
            types = {"out_ptr": "*" + TRITON_TYPES[self.out_dtype], "lse_ptr": work, **data}
            for i, dtype in enumerate(self.partial_dtypes):
                types |= {f"out{i}_ptr": "*" + TRITON_TYPES[dtype], f"lse{i}_ptr": work}
            if self.sinks_dtype:
                types["sinks_ptr"] = "*" + TRITON_TYPES[self.sinks_dtype]
        else:
            types = {"dq_ptr": low, "dk_ptr": low, "dv_ptr": low, **data}
            types |= {"grad_ptr": low, "lse_ptr": work, "delta_ptr": work}
        return types | {"num_rows": "i64", "num_keys": "i64"}


@functools.cache
def block_kernel(shape: BlockShape, kernel: str, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import "merge_block" or "block_backward" for ``shape``."""
    values = dataclasses.asdict(shape) | {
        "arguments": list(shape.signature(kernel)),
        "num_partials": len(shape.partial_dtypes),
        "work": f"tl.{shape.work_dtype}",
        "blocks": shape.blocks,
        "tile_rows": shape.blocks * shape.rows,
        "tile_keys": shape.blocks * shape.keys,
        "row_block": max(LEAST, padded(shape.blocks * shape.rows)),
        "key_block": max(LEAST, padded(shape.blocks * shape.keys)),
        "head_block": max(LEAST, padded(shape.head_dim)),
        "value_block": max(LEAST, padded(shape.value_dim)),
        "group": shape.num_heads // shape.num_key_heads,
        "shape_text": repr(shape),
    }
    return load_kernel(kernel, render(f"{kernel}.py.jinja", values), directory)


def launch_merge_block(
    shape: BlockShape, q: Tensor, k: Tensor, v: Tensor, partials: Sequence[tuple[Tensor, Tensor]],
    sinks: Tensor | None, directory: Path | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to the branch and merge with partials: (out [R, H, Dv] in ``out_dtype``, lse [R, H]).

    Args:
        shape: describes all tensors below.
        q: [R, H, D].
        k: [S, Hkv, D].
        v: [S, Hkv, Dv].
        partials: (out [R, H, Dv], lse [R, H]) each; not read where lse is -inf or +inf.
        sinks: [H] or None.
        directory: where the generated file goes; None for the default.
    """
    out = q.new_empty(
        (q.shape[0], shape.num_heads, shape.value_dim), dtype=getattr(torch, shape.out_dtype)
    )
    lse = q.new_empty(q.shape[:2], dtype=getattr(torch, shape.work_dtype))
    inputs = [q, k, v, *(x for pair in partials for x in pair)]
    if sinks is not None:
        inputs.append(sinks)
    kernel = block_kernel(shape, "merge_block", directory)
    num_programs = -(-q.shape[0] // (shape.blocks * shape.rows)) * shape.num_heads
    sizes = (q.shape[0], k.shape[0])
    kernel.launch(num_programs, out, lse, *(x.contiguous() for x in inputs), *sizes)
    return out, lse


def launch_block_backward(
    shape: BlockShape, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    directory: Path | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the branch in one launch.

    Args:
        shape: describes all tensors below.
        grad_out: [R, H, Dv].
        q: [R, H, D].
        k: [S, Hkv, D].
        v: [S, Hkv, Dv].
        lse: [R, H] of the whole softmax, +inf where a row sees nothing.
        delta: [R, H], row sums of grad_out * out.
        directory: where the generated file goes; None for the default.
    """
    grads = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    inputs = (x.contiguous() for x in (q, k, v, grad_out, lse, delta))
    kernel = block_kernel(shape, "block_backward", directory)
    num_programs = -(-q.shape[0] // (shape.blocks * shape.rows)) * shape.num_key_heads
    kernel.launch(num_programs, *grads, *inputs, q.shape[0], k.shape[0])
    return grads

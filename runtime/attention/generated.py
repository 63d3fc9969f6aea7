"""The generated kernels on a tile of keys: every row sees an interval of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spec_compile.codegen import attention as codegen
from spec_compile.codegen.attention import AttentionShape, Cotangent, tile_of
from spec_compile.codegen.kernel import dtype_name
from spec_compile.codegen.triton_mode import triton_mode

from .interface import Cut
from .intervals import Intervals


class Generated:
    """Our Triton kernels, through `attend` and `attend_backward`; blocks are a special case."""

    name = "triton"
    device_type: str | None = None
    cut = Cut.INTERVALS
    most_keys: int | None = None

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        mode = triton_mode(device.type)
        if mode is None:
            return f"Triton does not compile for {device.type} here"
        if mode == "triton-interpreted":
            return None if dtype != torch.float64 else "it takes no float64"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, found {dtype}"
        if max(head_dim, value_dim) > 256:
            return f"it needs head dims up to 256, found {head_dim} and {value_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        return attend(_block(q, k, causal), q, k, v, scale)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        cotangent = Cotangent(
            grad_out.contiguous(), lse.contiguous(), (grad_out.float() * out.float()).sum(-1)
        )
        return attend_backward(_block(q, k, causal), cotangent, q, k, v, scale)


def attend(
    intervals: Intervals, q: Tensor, k: Tensor, v: Tensor, scale: float, *, every_row: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (out [R, Hq, Dv], lse [R, Hq]) in one launch; 0 and -inf where a row sees nothing.

    Unless ``every_row`` is to be written, ``out`` is arbitrary in such rows.
    """
    shape, device = _shape(q, k, v, scale), q.device
    tile = tile_of(shape, "attention_forward")
    tiles = intervals.row_tiles(tile.rows, tile.keys, device, every_row=every_row)
    q, k, v = (x.contiguous() for x in (q, k, v))
    vectors = intervals.vectors(device)
    return codegen.launch_forward(shape, q, k, v, vectors, tiles, every_row=every_row)


def attend_backward(
    intervals: Intervals, cotangent: Cotangent, q: Tensor, k: Tensor, v: Tensor, scale: float, *,
    onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) like q, k and v; 0 for rows and keys that see nothing of each other.

    Given running sums ``onto``, dk and dv are added to them, and returned so; only tiles of keys that some
    row sees are read or written.
    """
    shape, device = _shape(q, k, v, scale), q.device
    q, k, v = (x.contiguous() for x in (q, k, v))
    vectors = intervals.vectors(device)
    tile = tile_of(shape, "attention_backward_q")
    tiles = intervals.row_tiles(tile.rows, tile.keys, device, every_row=True)
    dq = codegen.launch_backward_q(shape, q, k, v, cotangent, vectors, tiles)
    tile = tile_of(shape, "attention_backward_kv")
    lists = intervals.key_lists(tile.rows, tile.keys, device, every_key=onto is None)
    dk, dv = codegen.launch_backward_kv(shape, q, k, v, cotangent, vectors, lists, onto)
    return dq, dk, dv


def _shape(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionShape:
    return AttentionShape(
        num_heads=q.shape[1], num_key_heads=k.shape[1], head_dim=q.shape[2], value_dim=v.shape[2],
        dtype=dtype_name(q.dtype), scale=scale,
    )  # fmt: skip


def _block(q: Tensor, k: Tensor, causal: bool) -> Intervals:
    low = np.zeros(q.shape[0], dtype=np.int64)
    high = np.arange(1, len(low) + 1) if causal else np.full_like(low, k.shape[0])
    return Intervals(low, high, k.shape[0])

"""FlashAttention 2 as built into torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .interface import Cut


class DenseFlash:
    """What every copy of FlashAttention takes: dense blocks of 16-bit floats on CUDA."""

    device_type: str | None = "cuda"
    cut = Cut.DENSE
    most_keys: int | None = None

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, found {dtype}"
        if head_dim != value_dim or head_dim % 8 or head_dim > 256:
            return (
                "it needs equal head dims that are multiples of 8 up to 256, "
                f"found {head_dim} and {value_dim}"
            )
        return None


class AtenFlash(DenseFlash):
    """FlashAttention 2 as built into torch, on dense blocks."""

    name = "aten_flash"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, q.shape[0], k.shape[0], 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        return out[0], lse[0].transpose(0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        seed, unused = _no_seed(q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_out[None], q[None], k[None], v[None], out[None], lse.transpose(0, 1)[None].contiguous(),
            None, None, q.shape[0], k.shape[0], 0.0, causal, seed, unused, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (x[0] for x in grads)
        return dq, dk, dv


@functools.cache
def _no_seed(device: torch.device) -> tuple[Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.uint64, device=device)
    return state, torch.zeros((), dtype=torch.uint64, device=device)

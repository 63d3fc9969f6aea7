"""ATen's CPU flash attention behind the declared interface."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .interface import Cut, batched, unbatched


class AtenCpu:
    """ATen's CPU flash attention; needs equal head dims of keys and values."""

    name = "aten_cpu"
    device_type: str | None = "cpu"
    cut = Cut.MASKED
    most_keys: int | None = None

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"it does not take {dtype}"
        if head_dim != value_dim:
            return f"it needs equal head dims, found {head_dim} for keys and {value_dim} for values"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            batched(q), batched(k), batched(v), 0.0, causal, attn_mask=mask, scale=scale
        )
        out, lse = unbatched(out), unbatched(lse)
        if mask is not None:
            # the kernel reports lse 0 for a row without keys, which a merge would take for a score
            dead = mask.amax(-1) == -math.inf
            lse = lse.masked_fill(dead[:, None], -math.inf)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            batched(grad_out), batched(q), batched(k), batched(v), batched(out),
            batched(lse), 0.0, causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (unbatched(grad) for grad in grads)
        return dq, dk, dv

"""cuDNN's fused attention through ATen: the fastest dense kernel on Hopper."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .interface import Cut, batched, unbatched

MOST_KEYS = 16384
"""Keys of one backward call: its scratch memory grows with query heads x keys."""


class Cudnn:
    """Dense blocks. Its packed form is not used: torch 2.11 builds that graph anew in every call.

    A graph is built for every new pair of lengths (some 0.1 s for both directions), so lengths should
    come from a small set.
    """

    name = "cudnn"
    device_type: str | None = "cuda"
    cut = Cut.DENSE
    most_keys: int | None = MOST_KEYS

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, found {dtype}"
        if head_dim % 8 or value_dim % 8 or max(head_dim, value_dim) > 256:
            return (
                "it needs head dims that are multiples of 8 up to 256, "
                f"found {head_dim} and {value_dim}"
            )
        if not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        if torch.are_deterministic_algorithms_enabled():
            return "its backward adds in any order, and deterministic algorithms are asked for"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(batched(x.contiguous()) for x in (q, k, v)),
            None,
            True,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return unbatched(out), lse.reshape(q.shape[1], q.shape[0]).transpose(0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        # one layout always: ATen keeps graphs by the layout of q, k and v alone
        grad, *inputs, out = (batched(x.contiguous()) for x in (grad_out, q, k, v, out))
        seed = _no_seed(q.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, *inputs, out, batched(lse).contiguous()[..., None], seed, seed, None, None, None,
            q.shape[0], k.shape[0], 0.0, causal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (unbatched(x) for x in grads)
        return dq, dk, dv


@functools.cache
def _no_seed(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)

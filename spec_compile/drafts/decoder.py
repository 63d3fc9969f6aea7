"""The ordinary decoder layer in two halves, so that a draft puts its own attention between them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .layers import GatedMLP, RMSNorm
from .rope import rotate


class SelfAttention(nn.Module):
    """Projections of an attention; the mask is the draft's business."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        head_dim, bias = config.head_dim, config.attention_bias
        q_width = config.num_attention_heads * head_dim
        kv_width = config.num_key_value_heads * head_dim
        self.q_proj = nn.Linear(width, q_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.config = config

    def forward(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make rotated queries and keys, and values, [R, H, head_dim] each, from ``u`` [R, width]."""
        return self.queries(u, positions), *self.keys(u, positions)

    def queries(self, u: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries, [R, Hq, head_dim]."""
        q = self.q_proj(u).unflatten(-1, (-1, self.config.head_dim))
        q = self.q_norm(q) if self.config.qk_norm else q
        return rotate(q, positions, self.config.rope_theta, self.config.rope_scaling)

    def keys(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [R, Hkv, head_dim] each."""
        k = self.k_proj(u).unflatten(-1, (-1, self.config.head_dim))
        v = self.v_proj(u).unflatten(-1, (-1, self.config.head_dim))
        k = self.k_norm(k) if self.config.qk_norm else k
        return rotate(k, positions, self.config.rope_theta, self.config.rope_scaling), v


class DecoderLayer(nn.Module):
    """A pre-norm layer: ``h + attention(norm(h))``, then ``h + mlp(norm(h))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = SelfAttention(config, dim)
        self.input_layernorm = RMSNorm(dim, eps)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp = GatedMLP(dim, config.intermediate_size, config.hidden_act)

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of hidden states [R, D]."""
        q, k, v = self.self_attn(self.input_layernorm(hidden), positions)
        return q, k, v

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Add attention's output [R, Hq, head_dim] and the MLP to the residual [R, D]."""
        hidden = residual + self.self_attn.o_proj(mixed.flatten(1))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output

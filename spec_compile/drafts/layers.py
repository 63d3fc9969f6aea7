"""Layers that drafts share: all act on each row alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.errors import ConfigError
from spec_compile.ir.dtypes import accumulator


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Look an activation up by its public name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, found {name!r}")
    return ACTIVATIONS[name]


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last dim, in fp32 (fp64 for fp64)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        wide = x.to(accumulator(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``; SwiGLU when the activation is silu."""

    def __init__(self, dim: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row."""
        down: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return down

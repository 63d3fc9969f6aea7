"""Adaptor for transformers' experts interface: mixtures of experts whose rows stay apart.

Transformers' own ways are no use in a graph of sharded rows: "eager" loops over the experts that the data
hits, "grouped_mm" sorts rows among each other, "batched_mm" copies an expert's weights for every row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from spec_compile.ir.experts import expert_linear

NAME = "spec_compile"


def experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Send each row [D] of [T, D] through its k experts and add up by weight; indices and weights [T, k]."""
    x = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[-1], -1)
    if module.has_gate:
        x = module._apply_gate(_linear(module, "gate_up_proj", x, top_k_index))
    else:
        x = module.act_fn(_linear(module, "up_proj", x, top_k_index))
    x = _linear(module, "down_proj", x, top_k_index)
    mixed: Tensor = (x * top_k_weights.unsqueeze(-1)).sum(1)
    return mixed.to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor, top_k_index: Tensor) -> Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    out: Tensor = expert_linear(x, getattr(module, name), bias, top_k_index, module.is_transposed)
    return out


def install(model: nn.Module) -> None:
    """Make a (copied) transformers model run its experts through `experts`; the user's setting is the original's."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            module.config._experts_implementation = NAME  # type: ignore[union-attr]

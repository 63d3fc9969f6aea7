"""The two-stage models whose steps are timed with taps: a few decoder layers, and an EAGLE-3 draft."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..api import parallelize
from ..drafts import Eagle3
from ..plan import Plan
from ..runtime.model import ParallelModel
from .tap_cpu import VOCABULARY as CPU_VOCABULARY
from .tap_steps import VOCABULARY as GPU_VOCABULARY

HEAD_DIM = 64
GPU_LAYERS, CPU_LAYERS = 8, 2


def build_on_gpu(hidden: int, device: torch.device) -> ParallelModel:
    """Bind 8 layers in bfloat16 to this rank, with four micro-batches."""
    return _build(hidden, device, GPU_LAYERS, GPU_VOCABULARY, torch.bfloat16, 4)


def build_on_cpu(hidden: int) -> ParallelModel:
    """Bind 2 layers in float32 to this rank, with two micro-batches."""
    return _build(hidden, torch.device("cpu"), CPU_LAYERS, CPU_VOCABULARY, torch.float32, 2)


def _build(
    hidden: int,
    device: torch.device,
    layers: int,
    vocabulary: int,
    dtype: torch.dtype,
    micro_batches: int,
) -> ParallelModel:
    heads = max(1, hidden // HEAD_DIM)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=HEAD_DIM,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        target: Any = LlamaForCausalLM(config)
    target.to(dtype)
    draft = Eagle3.from_target(target, ttt_length=3)
    plan = Plan(pp=2, micro_batches=micro_batches, verify=False)
    return parallelize(target, draft.to(device), plan)

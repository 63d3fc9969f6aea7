"""A language in which two tokens nearly decide the next, and models that have learned it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import spec_compile as sc

VOCAB = 32


def documents(number: int, length: int, seed: int) -> Tensor:
    """Draw [number, length] tokens: a rule of the last two, and one in five at random."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, VOCAB, (number, length), generator=generator)
    random = torch.rand(number, length, generator=generator) < 0.2
    tokens = noise.clone()
    for t in range(2, length):
        rule = (tokens[:, t - 1] + 2 * tokens[:, t - 2] + 1) % VOCAB
        tokens[:, t] = torch.where(random[:, t], noise[:, t], rule)
    return tokens


def packed(rows: Tensor) -> sc.PackedBatch:
    number, length = rows.shape
    ends = torch.arange(number + 1) * length
    return sc.PackedBatch(rows.flatten(), ends, torch.ones(rows.numel(), dtype=torch.bool))


def new_target() -> Any:
    """Build a Qwen3 whose head dim vLLM's CPU attention has."""
    config = Qwen3Config(
        num_hidden_layers=4, hidden_size=64, intermediate_size=128, vocab_size=VOCAB, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return nn.Module.to(Qwen3ForCausalLM(config), torch.float32)


def train(target: Any, draft: Any, steps: int) -> dict[str, Tensor]:
    """Train the target where there is no draft, else the draft alone; gives what was exported."""
    model = sc.parallelize(target, draft, sc.Plan())
    which = "policy" if draft is None else "draft"
    groups: dict[str, Any] = {which: {"lr": 3e-3}}
    optimizer = torch.optim.Adam(model.param_groups(**groups))
    for step in range(steps):
        batch = packed(documents(16, 32, seed=step))
        model.step(batch, likelihood if draft is None else None)
        optimizer.step()
        optimizer.zero_grad()
    exported = {name: tensor.clone() for name, tensor in model.export_weights(which)}
    model.close()
    return exported


def likelihood(rows: sc.TokenOutputs) -> Tensor:
    return -(rows.logprobs * rows.mask).sum()

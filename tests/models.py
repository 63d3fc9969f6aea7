"""Tiny targets, unfriendly batches, and two drafts that the library does not contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import spec_compile as sc
from spec_compile.batch import PackedBatch

UNFRIENDLY = (7, 21, 1, 35, 0, 3)
M = TypeVar("M", bound=nn.Module)


def tiny_qwen3(
    *,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 61,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 12,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Any:
    """Qwen3 with q/k norm and a head_dim that is not hidden / heads."""
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 8,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
    )
    return randomise(nn.Module.to(Qwen3ForCausalLM(config), dtype), seed)


def tiny_llama(
    *,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 53,
    heads: int = 4,
    kv_heads: int = 1,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Any:
    """Llama with llama3 RoPE scaling and one key-value head."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 4,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    return randomise(nn.Module.to(LlamaForCausalLM(config), dtype), seed)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 5,
            "query_pre_attn_scalar": 10,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Targets that differ from a dense Llama: (configuration class of transformers, own fields)."""
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
FAMILIES["qwen3_next"] = (
    "Qwen3NextConfig",
    LINEAR
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 12,
    },
)
FAMILIES["qwen3_5"] = ("Qwen3_5TextConfig", LINEAR)
HYBRIDS = ("qwen3_next", "qwen3_5")
"""Those with linear attention."""


def tiny_of_family(
    name: str,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> Any:
    """A model of 3 layers of one of `FAMILIES`; experts in a loop, as other ways know no fp64."""
    kind, own = FAMILIES[name]
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "vocab_size": 53,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
    }
    config = getattr(transformers, kind)(**{**sizes, **own})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype)
    return model if device == "meta" else randomise(model, seed)


def randomise(module: M, seed: int, scale: float = 0.25) -> M:
    """Draw weights large enough that attention and laws are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + scale * noise)
    return module


def packed_batch(
    lengths: Sequence[int] = UNFRIENDLY,
    *,
    vocab: int = 53,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    draft_mask: bool = False,
) -> PackedBatch:
    """Random tokens, masks (True at some first tokens too), advantages and old log-probs."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def uniform() -> Tensor:
        return torch.rand(total, generator=generator, dtype=torch.float64)

    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return PackedBatch(
        torch.randint(0, vocab, (total,), generator=generator),
        torch.tensor(offsets),
        uniform() < 0.7,
        {
            "advantages": (4 * uniform() - 2).to(dtype),
            "old_logprobs": (-5 * uniform()).to(dtype),
        },
        draft_mask=uniform() < 0.8 if draft_mask else None,
    )


class GatedDraft(nn.Module):
    """A gated recurrence over steps, its own head sizes, cross-entropy against token ids."""

    def __init__(
        self,
        target_dim: int,
        vocab: int,
        taps: tuple[int, ...] = (3, 0, 3),
        steps: int = 3,
        dim: int = 20,
    ) -> None:
        super().__init__()
        self.taps, self.steps, self.heads, self.head_dim = taps, steps, 3, 10
        width = target_dim + dim
        self.start = nn.Linear(len(taps) * target_dim, dim)
        self.query = nn.Linear(width, 3 * 10)
        self.key = nn.Linear(width, 10)
        self.value = nn.Linear(width, 6)
        self.frequency = nn.Parameter(torch.linspace(0.05, 1.0, 10))
        self.gate = nn.Linear(width + 3 * 6, dim)
        self.update = nn.Linear(width + 3 * 6, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        document, index = inputs.document, inputs.index
        state = torch.tanh(self.start(inputs.features))
        branches: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        main: tuple[Tensor, Tensor] | None = None
        loss_sum, count, hits = state.new_zeros(()), state.new_zeros(()), state.new_zeros(())
        for step in range(self.steps):
            token = sc.shift(inputs.tokens, step + 1, document)
            x = torch.cat((inputs.embedding(token), state), -1)
            wave = torch.sin((inputs.positions + step)[:, None] * self.frequency)
            query = self.query(x).unflatten(-1, (self.heads, self.head_dim)) + wave[:, None]
            key = (self.key(x) + wave)[:, None]
            value = self.value(x)[:, None]
            if main is None:
                main = (key, value)
            else:
                branches.append((key, value, index, index))
            mixed = sc.branch_attention(
                query,
                *main,
                branches,
                q_limit=index + 1,
                q_document=document,
                k_document=document,
                scale=0.4,
            )
            seen = torch.cat((x, mixed.flatten(1)), -1)
            keep = torch.sigmoid(self.gate(seen))
            state = keep * state + (1 - keep) * torch.tanh(self.update(seen))

            logits = self.head(state)
            label = sc.shift(inputs.tokens, step + 2, document)
            valid = sc.shift(inputs.loss_mask, step + 2, document)
            loss = logits.logsumexp(-1) - logits.gather(-1, label[:, None])[:, 0]
            loss_sum = loss_sum + (loss * valid).sum() / (step + 1)
            count = count + valid.sum()
            hits = hits + ((logits.argmax(-1) == label) & valid).sum()
        return sc.DraftOutput(loss_sum, count, {"top1": hits})


class WindowDraft(nn.Module):
    """Reads the teacher alone: a sliding window with sinks, a shifted state, the target's head."""

    taps: tuple[int, ...] = ()

    def __init__(self, target_dim: int, heads: int = 4, window: int = 5) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.mix = nn.Linear(2 * target_dim, target_dim, bias=False)
        self.qkv = nn.Linear(target_dim, 3 * 8 * heads, bias=False)
        self.out = nn.Linear(8 * heads, target_dim, bias=False)
        self.sinks = nn.Parameter(torch.linspace(-1.0, 1.0, heads))
        self.ahead = nn.Linear(target_dim, target_dim)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        document = inputs.document
        embedded = inputs.embedding(inputs.tokens)
        state = self.mix(torch.cat((inputs.teacher.hidden, embedded), -1))
        q, k, v = self.qkv(state).unflatten(-1, (3, self.heads, 8)).unbind(1)
        mixed = sc.branch_attention(
            q,
            k,
            v,
            q_limit=inputs.index + 1,
            q_document=document,
            k_document=document,
            window=self.window,
            sinks=self.sinks,
        )
        near = state + self.out(mixed.flatten(1))
        far = near + torch.tanh(self.ahead(sc.shift(near, 1, document)))

        losses, counts = [], []
        for slot, hidden in enumerate((near, far)):
            logp = F.linear(hidden, inputs.teacher.weight).log_softmax(-1)
            label = sc.shift(inputs.tokens, slot + 1, document)
            valid = sc.shift(inputs.loss_mask, slot + 1, document)
            losses.append((-logp.gather(-1, label[:, None])[:, 0] * valid).sum())
            counts.append(valid.sum())
        return sc.DraftOutput(torch.stack(losses), torch.stack(counts))


def gated_draft(
    target: Any, *, taps: tuple[int, ...] = (3, 0, 3), steps: int = 3, seed: int = 1
) -> GatedDraft:
    weight = target.get_output_embeddings().weight
    draft = GatedDraft(weight.shape[1], weight.shape[0], taps, steps)
    return randomise(draft.to(weight.dtype), seed)


def window_draft(target: Any, *, window: int = 5, seed: int = 1) -> WindowDraft:
    weight = target.get_output_embeddings().weight
    return randomise(WindowDraft(weight.shape[1], window=window).to(weight.dtype), seed)

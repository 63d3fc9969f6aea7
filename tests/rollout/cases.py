"""Targets and drafts of known behaviour, and laws computed the long way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from tests.models import randomise, tiny_llama

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8, 2], [4, 4], [6, 0, 6],
           [9, 8, 7, 6, 5, 4, 3, 2, 1], [8, 8, 8]]  # fmt: skip


def near_bigram(vocab: int = 23, *, context: float = 0.3, seed: int = 0, **options: Any) -> Any:
    """Make a target whose law depends on the last token mostly, and on earlier ones by ``context``."""
    target = tiny_llama(vocab=vocab, seed=seed, kv_heads=2, **options)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(context)
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(4.0)
    return target


class BigramDraft(nn.Module):
    """A served draft of a user: the target's head on the last token's embedding alone, plus noise."""

    taps: tuple[int, ...] = (1,)
    ttt_length = 3

    def __init__(self, target: Any, noise: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.Parameter(target.model.norm.weight.detach().clone())
        self.head = nn.Parameter(target.lm_head.weight.detach().clone())
        self.eps = target.config.rms_norm_eps
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randn(self.head.shape, generator=generator, dtype=torch.float64)
        self.head.data += noise * drawn.to(self.head.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def step(
        self, state: Tensor, embedded: Tensor, positions: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:
        wide = embedded * torch.rsqrt(embedded.square().mean(-1, keepdim=True) + self.eps)
        return state, wide * self.norm

    def logits(self, output: Tensor) -> Tensor:
        return F.linear(output, self.head)


def eagle(target: Any, steps: int = 3, **options: Any) -> sc.drafts.Eagle3:
    return randomise(sc.drafts.Eagle3.from_target(target, steps, **options), seed=2)


def greedy(target: Any, prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """Decode by whole forwards of the unmodified model."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count:
            ids.append(int(target(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in stops:
                break
    return ids[len(prompt) :]


def law(logits: Sequence[float], params: sc.SamplingParams) -> list[float]:
    """Spell temperature, top-k and top-p out, token by token."""
    scaled = torch.tensor(logits, dtype=torch.float64) / params.temperature
    p = scaled.softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(p[token] for token in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += p[token] / total
        if mass >= params.top_p:
            break
    total = sum(p[token] for token in kept)
    return [p[token] / total if token in kept else 0.0 for token in range(len(p))]


def completion_laws(
    target: Any, prompt: list[int], length: int, params: sc.SamplingParams
) -> dict[tuple[int, ...], float]:
    """Enumerate the probability of every completion of a fixed length."""
    vocab = target.config.vocab_size
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(length):
        prefixes = list(itertools.product(range(vocab), repeat=size))
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
            logits = target(ids, use_cache=False).logits[:, -1].double().tolist()
        for prefix, row in zip(prefixes, logits, strict=True):
            for token, chance in enumerate(law(row, params)):
                chances[(*prefix, token)] = chances[prefix] * chance
    return {one: chance for one, chance in chances.items() if len(one) == length}


def predicted(target: Any, draft: Any, rows: list[list[int]]) -> float:
    """Evaluate the first drafted token at the last token of every row."""
    ends = torch.tensor([len(ids) for ids in rows]).cumsum(0)
    drafted = torch.zeros(int(ends[-1]), dtype=torch.bool)
    drafted[ends - 1] = True
    batch = sc.PackedBatch(
        torch.tensor([token for ids in rows for token in ids]),
        torch.cat((torch.zeros(1, dtype=torch.int64), ends)),
        drafted,
        anchors=ends - 2,
    )
    model = sc.parallelize(target, draft, sc.Plan())
    acceptance = model.evaluate(batch).acceptance[0]
    model.close()
    return acceptance

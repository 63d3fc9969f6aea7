"""Drafts whose attention is a softmax written by hand, as EAGLE-3 and older model codes write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import spec_compile as sc
from tests.spelled_drafts import HEAD_DIM, SpelledSteps, joined_eyes, repeated

Runs = list[Tensor]
Attend = Callable[[Tensor, Runs, Runs, Tensor], Tensor]
"""Of queries, keys and values [1, H, T, D] a step, and the trunk's mask [T, T], True where it is seen."""


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def concatenated(q: Tensor, keys: Runs, values: Runs, mask: Tensor) -> Tensor:
    """EAGLE-3's public training code: one more column of scores a step."""
    scores = torch.matmul(q, keys[0].transpose(2, 3)) / math.sqrt(HEAD_DIM)
    scores = scores + added(mask, q.dtype)
    for k in keys[1:]:
        own = (q * k).sum(-1) / math.sqrt(HEAD_DIM)
        scores = torch.cat((scores, own[..., None]), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    total = q.shape[2]
    mixed = torch.matmul(weights[..., :total], values[0])
    for i, v in enumerate(values[1:]):
        mixed = mixed + weights[..., total + i][..., None] * v
    return mixed


def einsums(q: Tensor, keys: Runs, values: Runs, mask: Tensor) -> Tensor:
    """Rows in front of heads, and a mask that fills."""
    q, k, v = (x.transpose(1, 2) for x in (q * HEAD_DIM**-0.5, keys[0], values[0]))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(~mask, float("-inf"))
    own = [torch.einsum("bqhd,bqhd->bhq", q, x.transpose(1, 2)) for x in keys[1:]]
    weights = (
        torch.cat([scores, torch.stack(own, -1)], -1).softmax(-1) if own else scores.softmax(-1)
    )
    total = q.shape[1]
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., :total], v)
    for i, x in enumerate(values[1:]):
        column = weights[..., total + i : total + i + 1].transpose(1, 2)
        mixed = mixed + column * x.transpose(1, 2)
    return mixed.transpose(1, 2)


def joined(q: Tensor, keys: Runs, values: Runs, mask: Tensor) -> Tensor:
    """As eager attention of transformers: all keys in one product, one mask."""
    k, v = torch.cat(keys, 2), torch.cat(values, 2)
    own = [torch.eye(q.shape[2], dtype=torch.bool)] * (len(keys) - 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * HEAD_DIM**-0.5
    scores = torch.where(torch.cat([mask, *own], 1), scores, torch.finfo(q.dtype).min)
    return torch.matmul(scores.softmax(-1), v)


def flat(q: Tensor, keys: Runs, values: Runs, mask: Tensor) -> Tensor:
    """`bmm` of heads."""
    scores = torch.bmm(q[0], keys[0][0].mT) * 0.3
    parts = [scores.masked_fill(mask.logical_not(), float("-inf"))]
    parts += [(q[0] * k[0]).sum(-1, keepdim=True) * 0.3 for k in keys[1:]]
    weights = torch.cat(parts, -1).softmax(-1)
    total = q.shape[2]
    mixed = torch.bmm(weights[:, :, :total], values[0][0])
    for i, v in enumerate(values[1:]):
        mixed = mixed + weights[:, :, total + i : total + i + 1] * v[0]
    return mixed[None]


WRITINGS: dict[str, Attend] = {
    "concatenated": concatenated,
    "einsums": einsums,
    "joined": joined,
    "flat": flat,
}


class WrittenSteps(SpelledSteps):
    """The recurrence of `SpelledSteps` with its own attention."""

    def __init__(
        self, target_dim: int, vocab: int, written: Attend, *, steps: int = 3, opt_in: bool = True
    ) -> None:
        super().__init__(target_dim, vocab, self._mask, steps=steps)
        self.written = written
        if opt_in:
            self.spec_compile_recognise = "execution"

    @staticmethod
    def _mask(inputs: sc.DraftInputs, step: int) -> Tensor:
        return joined_eyes(inputs, 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        total = q.shape[2]
        steps = range(k.shape[2] // total)
        keys, values = (
            [repeated(x[:, :, i * total : (i + 1) * total]) for i in steps] for x in (k, v)
        )
        return self.written(q, keys, values, mask)

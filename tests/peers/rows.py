"""Packed rows of random features for drafts, and the same draft weights under two names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.contract import DraftInputs

VOCAB, DIM, TAPS = 67, 24, (0, 1, 2)
SIZES: dict[str, Any] = {
    "hidden_size": DIM, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCAB, "target_hidden_size": DIM, "taps": TAPS,
}  # fmt: skip


def draft_inputs(lengths: Sequence[int], *, prompt: int, seed: int = 0) -> DraftInputs:
    """Inputs in fp64 without a target; the first ``prompt`` tokens of each document are not valid."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    positions = torch.tensor([t for n in lengths for t in range(n)])
    table = normal(VOCAB, DIM)
    return DraftInputs(
        features=normal(total, len(TAPS) * DIM),
        tokens=torch.randint(VOCAB, (total,), generator=generator),
        positions=positions,
        document=torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)]),
        index=torch.arange(total),
        loss_mask=(torch.rand(total, generator=generator) < 0.8) & (positions >= prompt),
        embedding=lambda ids: F.embedding(ids, table),
        teacher=SimpleNamespace(hidden=normal(total, DIM), weight=0.4 * normal(VOCAB, DIM)),
    )


def embedding_table(inputs: DraftInputs) -> Tensor:
    return inputs.embedding(torch.arange(VOCAB))


def documents(inputs: DraftInputs, *vectors: Tensor) -> list[list[Tensor]]:
    """Cut each vector into one piece a document."""
    counts = inputs.document.bincount().tolist()
    offsets = [0, *itertools.accumulate(counts)]
    return [[x[a:b] for x in vectors] for a, b in itertools.pairwise(offsets)]


def record_outputs(module: nn.Module) -> list[Tensor]:
    """Copies of every output of a module, from now on (a loss may overwrite logits)."""
    seen: list[Tensor] = []
    module.register_forward_hook(lambda _module, _args, out: seen.append(out.detach().clone()))
    return seen


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_close_by_name(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float = 1e-4
) -> None:
    """Same names, and every value within ``tolerance`` of the largest entry."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        size = float(theirs[name].abs().max())
        assert size > 0, name
        difference = float((value - theirs[name]).abs().max())
        assert difference <= tolerance * max(size, 1.0), (name, difference, size)


def unit_teacher(inputs: DraftInputs) -> DraftInputs:
    """Scale the teacher's states so that a norm with unit weights leaves them as they are."""
    hidden = inputs.teacher.hidden
    unit = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    teacher = SimpleNamespace(hidden=unit, weight=inputs.teacher.weight)
    return dataclasses.replace(inputs, teacher=teacher)

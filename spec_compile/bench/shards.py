"""The attention of one context-parallel rank as it runs in a step, alone on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.fabric import Fabric
from spec_compile.runtime.layout import plan_layout

FORWARD_FLOPS = 4
"""Per visible pair, query head and head-dim element: two products of a multiply and an add."""
BACKWARD_FLOPS = 10
"""Likewise: five products."""


@dataclass(frozen=True)
class Shape:
    """Heads, dims and dtype of one attention."""

    heads: int = 32
    key_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16


def packed_lengths(total: int, seed: int = 0) -> tuple[int, ...]:
    """Log-normal document lengths, mean about 3000 for long rows, that sum to ``total``."""
    draw = np.random.default_rng(seed)
    top = max(16, total // 6)
    centre = np.log(max(4.0, min(1800.0, total / 16)))
    lengths: list[int] = []
    while sum(lengths) < total:
        length = int(np.clip(draw.lognormal(centre, 1.0), 1, top))
        lengths.append(min(length, total - sum(lengths)))
    return tuple(lengths)


def causal_pairs(lengths: Sequence[int]) -> int:
    """Visible (row, key) pairs of causal attention inside documents."""
    return sum(length * (length + 1) // 2 for length in lengths)


class ReplayFabric:
    """A ring of which one rank runs: hands out what the others would send, at no cost."""

    def __init__(self, rank: int, size: int, held: list[list[Tensor]]) -> None:
        self.name, self.rank, self.size, self._held = "cp", rank, size, held

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Drop it."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0) -> Tensor:
        """Return the keys or values of that hop; gradients arrive as zeros."""
        hop, i = divmod(tag, 2)
        if hop < self.size - 1:
            return self._held[(self.rank - hop - 1) % self.size][i]
        return torch.zeros(tuple(shape), dtype=dtype, device=self._held[0][i].device)

    def flush(self) -> None:
        """Nothing is under way."""


class RankAttention:
    """Forward and backward of one rank's share of a packed causal row."""

    def __init__(
        self, shape: Shape, lengths: Sequence[int], cp: int, rank: int, device: torch.device, *,
        strategy: str, backend: str, branches: int = 0,
    ) -> None:  # fmt: skip
        layout = plan_layout(lengths, cp)
        self.layout, self.rank = layout, rank
        draw = torch.Generator(device=device).manual_seed(rank)

        def random(rows: int, heads: int) -> Tensor:
            size = (rows, heads, shape.dim)
            x = torch.randn(size, generator=draw, device=device, dtype=torch.float32)
            return x.to(shape.dtype)

        n, total = layout.rows_per_rank, len(layout.slots)
        held = [[random(n, shape.key_heads) for _ in range(2)] for _ in range(cp)]
        fabric = ReplayFabric(rank, cp, held)
        self.context = RunContext({"cp": cast(Fabric, fabric)}, options={"attention": backend})
        ring = strategy == "ring"
        keys = held[rank] if ring else [torch.cat([pair[i] for pair in held]) for i in range(2)]
        branch = [random(n, shape.key_heads) for _ in range(2 * branches)]
        self.inputs = [random(n, shape.heads), *keys, *branch]
        self.inputs = [x.detach().requires_grad_() for x in self.inputs]
        self.grad = random(n, shape.heads)
        self.branches, self.total, self.shape = branches, total, shape
        self.strategy = "ring" if ring else "local"
        self._index(lengths, device)

    def _index(self, lengths: Sequence[int], device: torch.device) -> None:
        """The index vectors, made once: layers share them in a step too."""
        layout = self.layout
        document = np.full(self.total, len(lengths))
        document[: layout.num_tokens] = np.repeat(np.arange(len(lengths)), lengths)
        rows = layout.rows(self.rank)
        vectors = (rows + 1, document[rows], document, layout.slots, np.zeros(0, np.int64))
        self.vectors = [torch.from_numpy(x).to(device) for x in vectors]

    def forward(self) -> Tensor:
        """One forward."""
        limit, q_document, document, slots, unread = self.vectors
        q, k, v, *branch = self.inputs
        none = [unread] * self.branches
        operator: Any = torch.ops.spec_compile.context_attention
        with bind(self.context):
            out, _ = operator(
                q, k, v, branch[: self.branches], branch[self.branches :], none, none, limit,
                q_document, document, slots, self.layout.num_tokens, None, self.shape.dim**-0.5, -1,
                "d" * self.branches, self.strategy, "auto", "cp",
            )  # fmt: skip
        return cast(Tensor, out)

    def backward(self, out: Tensor) -> None:
        """One backward; the graph is kept."""
        torch.autograd.grad(out, self.inputs, self.grad, retain_graph=True)


def useful_flops(shape: Shape, lengths: Sequence[int]) -> tuple[int, int]:
    """FLOPs of the visible area, forward and backward, over all ranks."""
    elements = causal_pairs(lengths) * shape.heads * shape.dim
    return FORWARD_FLOPS * elements, BACKWARD_FLOPS * elements

"""The attention of one context-parallel rank as it runs in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.runtime.layout import RowLayout

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


def flops_of(shape: Shape, pairs: int) -> tuple[int, int]:
    """FLOPs of so many visible pairs, forward and backward."""
    elements = pairs * shape.heads * shape.dim
    return FORWARD_FLOPS * elements, BACKWARD_FLOPS * elements


def random_rows(rows: int, heads: int, shape: Shape, draw: torch.Generator) -> Tensor:
    """Standard normal [rows, heads, dim] on the generator's device, in the shape's dtype."""
    size = (rows, heads, shape.dim)
    return torch.randn(size, generator=draw, device=draw.device, dtype=shape.dtype)


class ContextAttention:
    """One rank's calls of the lowered operator on a packed causal row.

    Args:
        shape: of the attention.
        layout: where the rows live.
        lengths: of the documents.
        rank: index inside the cp group.
        device: where it runs.
        strategy: how the main keys and queries meet.
    """

    def __init__(
        self, shape: Shape, layout: RowLayout, lengths: Sequence[int], rank: int,
        device: torch.device, *, strategy: str,
    ) -> None:  # fmt: skip
        self._strategy, self._scale, self._live = strategy, shape.dim**-0.5, layout.num_tokens
        document = np.full(len(layout.slots), len(lengths))
        document[: layout.num_tokens] = np.repeat(np.arange(len(lengths)), lengths)
        # visiting rows are known on both sides: then the vectors are of all ranks' rows
        rows = layout.slots if strategy == "pass_q" else layout.rows(rank)
        vectors = (rows + 1, document[rows], document, layout.slots, np.zeros(0, np.int64))
        # made once: layers share them in a step too
        self._vectors = [torch.from_numpy(x).to(device) for x in vectors]

    def main(self, k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Main keys and values as the strategy wants them: gathered, or own rows."""
        if self._strategy != "all_gather" or size == 1:
            return k, v
        gather: Any = torch.ops.spec_compile.gather_packed
        slots = self._vectors[3]
        return gather(k, slots, "cp"), gather(v, slots, "cp")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, branch_k: list[Tensor], branch_v: list[Tensor]
    ) -> Tensor:
        """Attend to the main keys of `main` and to diagonal branches; [n, heads, dim]."""
        limit, q_document, document, slots, unread = self._vectors
        none = [unread] * len(branch_k)
        strategy = "local" if self._strategy == "all_gather" else self._strategy
        operator: Any = torch.ops.spec_compile.context_attention
        out, _ = operator(
            q, k, v, branch_k, branch_v, none, none, limit, q_document, document, slots,
            self._live, None, self._scale, -1, "d" * len(branch_k), strategy, "auto", "cp",
        )  # fmt: skip
        return cast(Tensor, out)

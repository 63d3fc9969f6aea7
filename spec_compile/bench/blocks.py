"""Block drafts (DFlash, DSpark): anchored blocks of query rows over the main keys, beside FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.runtime.attention.backends import backend_for
from spec_compile.runtime.context import RunContext, bind

from .replay import ReplayFabric
from .report import Ideal, Row
from .rows import Settings, measure_rank, row_of
from .shards import Shape, flops_of, random_rows
from .work import Measured, Work, consumed


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of one packed row hang."""

    anchors: Tensor
    """int64 [A], ascending; row ``a`` of document d, before which the block's main keys end."""
    document: Tensor
    """int64 [T]."""
    block_size: int

    @classmethod
    def drawn(
        cls, lengths: Sequence[int], number: int, block_size: int, device: torch.device, seed: int = 0
    ) -> Blocks:  # fmt: skip
        """Draw ``number`` distinct anchors evenly over the rows."""
        document = np.repeat(np.arange(len(lengths)), lengths)
        draw = np.random.default_rng(seed)
        anchors = np.sort(draw.choice(len(document), size=number, replace=False))
        return cls(
            torch.from_numpy(anchors).to(device), torch.from_numpy(document).to(device), block_size
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.document)

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs, the blocks' own included."""
        document = self.document.cpu().numpy()
        anchors = self.anchors.cpu().numpy()
        starts = np.searchsorted(document, document[anchors])
        return int(((anchors - starts) * self.block_size + self.block_size**2).sum())


class BlockRank:
    """One rank's blocks through the operator that a step calls; every cp-th block is its own.

    Args:
        shape: of the attention.
        blocks: of all ranks.
        fabric: the cp group, from which the main keys are gathered.
        device: where it runs.
        backend: name of the attention backend.
    """

    def __init__(
        self, shape: Shape, blocks: Blocks, fabric: ReplayFabric, device: torch.device, *, backend: str
    ) -> None:  # fmt: skip
        self.device, self._fabric = device, fabric
        self._context = RunContext({"cp": fabric}, options={"attention": backend})
        own = blocks.anchors[fabric.rank :: fabric.size]
        rows, keys = len(own) * blocks.block_size, -(-blocks.num_tokens // fabric.size)
        draw = torch.Generator(device=device).manual_seed(fabric.rank)
        self._q, self._grad = (random_rows(rows, shape.heads, shape, draw) for _ in range(2))
        self._main = [random_rows(keys, shape.key_heads, shape, draw) for _ in range(2)]
        self._branch = [random_rows(rows, shape.key_heads, shape, draw) for _ in range(2)]
        self._scale, self._live = shape.dim**-0.5, blocks.num_tokens
        limit = own.repeat_interleave(blocks.block_size)
        group = torch.arange(len(own), device=device).repeat_interleave(blocks.block_size)
        slots = torch.arange(keys * fabric.size, device=device)
        padding = slots.new_full((len(slots) - blocks.num_tokens,), int(blocks.document[-1]) + 1)
        document = torch.cat([blocks.document, padding])
        self._vectors = (group, limit, document[limit], document, slots)

    def forward(self) -> list[Tensor]:
        """[rows, heads, dim]."""
        group, limit, q_document, document, slots = self._vectors
        operator: Any = torch.ops.spec_compile.context_attention
        gather: Any = torch.ops.spec_compile.gather_rows
        with bind(self._context):
            main = [consumed(x) for x in self._main]
            if self._fabric.size > 1:
                main = [gather(x, "cp", 0) for x in main]
            branch = [[consumed(x)] for x in self._branch]
            out, _ = operator(
                consumed(self._q), *main, *branch, [group], [group], limit, q_document, document,
                slots, self._live, None, self._scale, -1, "g", "local", "auto", "cp",
            )  # fmt: skip
        return [out]

    def backward(self, outs: list[Tensor]) -> None:
        """Drop all gradients."""
        with bind(self._context):
            torch.autograd.backward(outs, [self._grad])

    def sent_bytes(self) -> int:
        """For the main keys and their gradients."""
        sent, self._fabric.sent_bytes = self._fabric.sent_bytes, 0
        return sent

    @property
    def pool_bytes(self) -> int:
        """Memory of the replayed values."""
        return self._fabric.pool_bytes

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, and keys and values with the blocks' own behind the main ones, of a group of one."""
        keys, values = (torch.cat([m, b]) for m, b in zip(self._main, self._branch, strict=True))
        return self._q, keys, values


def measure_blocks(
    settings: Settings, case: str, blocks: Blocks, cp: int, *, backend: str = "auto",
    ideal: Ideal | None = None, one_device: Row | None = None,
) -> Row:  # fmt: skip
    """Time each rank's blocks alone; the slowest counts.

    Args:
        settings: of the run.
        case: name of the row.
        blocks: of all ranks.
        cp: ranks.
        backend: name of the attention backend.
        ideal: rates to compare with.
        one_device: the row of the same case with one rank.
    """
    shape, device = settings.shape, settings.device
    # the last rank's anchors are the latest ones
    ranks = range(cp) if settings.all_ranks else [cp - 1]

    def run(rank: int) -> Measured:
        def make() -> Work:
            fabric = ReplayFabric("cp", rank, cp, device)
            return BlockRank(shape, blocks, fabric, device, backend=backend)

        return measure_rank(settings, make, lambda work: work.pool_bytes)

    measured = [run(rank) for rank in ranks]
    name = backend_for(device, shape.dtype, shape.dim, shape.dim, backend)
    what = "one device" if cp == 1 else "all_gather"
    flops = flops_of(shape, blocks.pairs)
    return row_of(settings, case, what, name, cp, ranks, measured, flops, ideal, 0, one_device)

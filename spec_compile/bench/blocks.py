"""Block drafts (DFlash, DSpark): anchored blocks of query rows over the main keys, beside FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.runtime.anchors import deal_anchors
from spec_compile.runtime.attention.backends import backend_for
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.kernel_cost import kernel_cost
from spec_compile.runtime.layout import plan_layout

from .replay import ReplayFabric
from .report import Ideal, Row
from .rows import Settings, measure_rank, row_of
from .shards import Shape, flops_of, random_rows
from .work import Measured, Work, consumed


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of one packed row hang."""

    lengths: tuple[int, ...]
    """Of the documents."""
    anchors: Tensor
    """int64 [A], ascending; row ``a`` of a document, before which the block's main keys end."""
    document: Tensor
    """int64 [T]."""
    block_size: int

    @classmethod
    def drawn(
        cls, lengths: Sequence[int], number: int, block_size: int, device: torch.device
    ) -> Blocks:
        """Draw ``number`` distinct anchors evenly over the rows."""
        document = np.repeat(np.arange(len(lengths)), lengths)
        draw = np.random.default_rng(0)
        anchors = np.sort(draw.choice(len(document), size=number, replace=False))
        where, of = (torch.from_numpy(x).to(device) for x in (anchors, document))
        return cls(tuple(lengths), where, of, block_size)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.document)

    @property
    def positions(self) -> Tensor:
        """int64 [T] on the host, of the rows in their documents."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs, the blocks' own included."""
        document = self.document.cpu().numpy()
        anchors = self.anchors.cpu().numpy()
        starts = np.searchsorted(document, document[anchors])
        return int(((anchors - starts) * self.block_size + self.block_size**2).sum())


class BlockRank:
    """One rank's blocks through the operator that a step calls; the blocks are dealt as in a step.

    Args:
        shape: of the attention.
        blocks: of all ranks.
        fabric: the cp group, from which the main keys are gathered.
        device: where it runs.
        strategy: "all_gather" or "pass_q".
        backend: name of the attention backend.
    """

    def __init__(
        self, shape: Shape, blocks: Blocks, fabric: ReplayFabric, device: torch.device, *,
        strategy: str = "all_gather", backend: str = "auto",
    ) -> None:  # fmt: skip
        self.device, self._fabric = device, fabric
        self._gathers = strategy == "all_gather" and fabric.size > 1
        self._strategy = "pass_q" if strategy == "pass_q" and fabric.size > 1 else "local"
        self._context = RunContext({"cp": fabric}, options={"attention": backend})
        name = backend_for(device, shape.dtype, shape.dim, shape.dim, backend)
        layout = plan_layout(blocks.lengths, fabric.size, kernels=kernel_cost({name}))
        size = blocks.block_size
        order = deal_anchors(blocks.anchors.cpu(), blocks.positions, fabric.size).to(device)
        anchors = blocks.anchors[order].view(fabric.size, -1)
        own = anchors[fabric.rank]
        rows, keys = len(own) * size, layout.rows_per_rank
        draw = torch.Generator(device=device).manual_seed(fabric.rank)
        self._q, self._grad = (random_rows(rows, shape.heads, shape, draw) for _ in range(2))
        self._main = [random_rows(keys, shape.key_heads, shape, draw) for _ in range(2)]
        self._branch = [random_rows(rows, shape.key_heads, shape, draw) for _ in range(2)]
        self._scale, self._live = shape.dim**-0.5, blocks.num_tokens
        # rows that visit are known on both sides
        limit = (anchors.flatten() if self._strategy == "pass_q" else own).repeat_interleave(size)
        group = torch.arange(len(own), device=device).repeat_interleave(size)
        slots = torch.from_numpy(layout.slots).to(device)
        padding = slots.new_full((len(slots) - blocks.num_tokens,), len(blocks.lengths))
        document = torch.cat([blocks.document, padding])
        self._vectors = (group, limit, document[limit], document, slots)

    def forward(self) -> list[Tensor]:
        """[rows, heads, dim]."""
        group, limit, q_document, document, slots = self._vectors
        operator: Any = torch.ops.spec_compile.context_attention
        gather: Any = torch.ops.spec_compile.gather_packed
        with bind(self._context):
            main = [consumed(x) for x in self._main]
            main = [gather(x, slots, "cp") for x in main] if self._gathers else main
            branch = [[consumed(x)] for x in self._branch]
            out, _ = operator(
                consumed(self._q), *main, *branch, [group], [group], limit, q_document, document,
                slots, self._live, None, self._scale, -1, "g", self._strategy, "auto", "cp",
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
    settings: Settings, case: str, blocks: Blocks, cp: int, *, strategy: str = "all_gather",
    backend: str = "auto", ideal: Ideal | None = None, one_device: Row | None = None,
) -> Row:  # fmt: skip
    """Time each rank's blocks alone; the slowest counts.

    Args:
        settings: of the run.
        case: name of the row.
        blocks: of all ranks; as many on each.
        cp: ranks.
        strategy: "all_gather" moves main keys, "pass_q" moves the blocks' queries.
        backend: name of the attention backend.
        ideal: rates to compare with.
        one_device: the row of the same case with one rank.
    """
    shape, device = settings.shape, settings.device

    def run(rank: int) -> Measured:
        def make() -> Work:
            fabric = ReplayFabric("cp", rank, cp, device)
            return BlockRank(shape, blocks, fabric, device, strategy=strategy, backend=backend)

        return measure_rank(settings, make, lambda work: work.pool_bytes)

    measured = [run(rank) for rank in range(cp)]
    name = backend_for(device, shape.dtype, shape.dim, shape.dim, backend)
    what = "one device" if cp == 1 else strategy
    flops = flops_of(shape, blocks.pairs)
    return row_of(settings, case, what, name, cp, range(cp), measured, flops, ideal, 0, one_device)

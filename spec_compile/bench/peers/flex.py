"""torch's FlexAttention on the masks of this package: causal packed rows, and anchored blocks.

Compiled, it is the fastest way to write such a mask by hand on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..blocks import BlockRank, Blocks
from ..replay import ReplayFabric
from ..report import Ideal, Row
from ..rows import Settings, measure_rank, row_of
from ..shards import causal_pairs, flops_of, random_rows
from ..work import Work, consumed

TILE = 128
"""Rows and keys of a tile of FlexAttention's mask."""
STRIP = 8 * TILE
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_mask(document: Tensor) -> Mask:
    """Key ``s`` is visible to row ``r`` of the same document iff ``s <= r``; document int64 [T]."""

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (document[key] == document[row])

    return visible


def block_mask(blocks: Blocks) -> Mask:
    """Rows of a block see the main keys of its document below its anchor, and the whole block.

    The blocks' own keys follow the main ones.
    """
    total, size = blocks.num_tokens, blocks.block_size
    anchors, document = blocks.anchors, blocks.document

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        anchor = anchors[row // size]
        main = key.clamp(max=total - 1)
        below = (key < anchor) & (document[main] == document[anchor])
        return torch.where(key < total, below, (key - total) // size == row // size)

    return visible


class FlexRank:
    """Forward and backward of FlexAttention; a `Work`.

    Args:
        q: [R, heads, dim].
        k: [S, key heads, dim].
        v: like k.
        mask: which key each row sees.
        compiled: False runs plain tensor code, for tests.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, compiled: bool = True
    ) -> None:  # fmt: skip
        self.device = q.device
        self._inputs = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
        self._grad = torch.randn_like(self._inputs[0])
        self._scale = q.shape[2] ** -0.5
        self._attend: Any = _compiled() if compiled else flex_attention
        self._mask = block_mask_of(mask, q.shape[0], k.shape[0], q.device)

    def forward(self) -> list[Tensor]:
        """[1, heads, R, dim]."""
        q, k, v = (consumed(x) for x in self._inputs)
        out = self._attend(q, k, v, block_mask=self._mask, scale=self._scale, enable_gqa=True)
        return [out]

    def backward(self, outs: list[Tensor]) -> None:
        """Drop all gradients."""
        torch.autograd.backward(outs, [self._grad])

    def sent_bytes(self) -> int:
        """One device sends nothing."""
        return 0


def block_mask_of(mask: Mask, rows: int, keys: int, device: torch.device) -> BlockMask:
    """What torch's create_block_mask gives, made a strip of rows at a time: neither whole nor compiled.

    A whole mask of 131072 rows has 17 billion elements, and compiling its making takes longer than a measurement.
    """
    whole, partial = [], []
    key = torch.arange(keys, device=device)
    padding = (0, -keys % TILE)
    none = torch.zeros((), dtype=torch.int64, device=device)
    for first in range(0, rows, STRIP):
        row = torch.arange(first, min(first + STRIP, rows), device=device)
        seen = mask(none, none, row[:, None], key[None]).expand(len(row), keys)
        padded = torch.nn.functional.pad(seen, (*padding, 0, -len(row) % TILE))
        counts = padded.unflatten(1, (-1, TILE)).sum(2, dtype=torch.int32)
        counts = counts.unflatten(0, (-1, TILE)).sum(1)
        whole.append(counts == TILE * TILE)
        partial.append((counts > 0) & (counts < TILE * TILE))
    tables = [_listed(torch.cat(kind)) for kind in (partial, whole)]
    return BlockMask.from_kv_blocks(
        *tables[0], *tables[1], BLOCK_SIZE=TILE, mask_mod=mask, seq_lengths=(rows, keys)
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Number of marked tiles in each row of tiles, and their columns first."""
    order = tiles.int().argsort(dim=1, descending=True, stable=True).int()
    return tiles.sum(1, dtype=torch.int32)[None, None], order[None, None].contiguous()


def measure_causal(
    settings: Settings, case: str, lengths: Sequence[int], ideal: Ideal | None = None
) -> Row:  # fmt: skip
    """Time causal attention inside documents on one device."""
    shape, device = settings.shape, settings.device
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def make() -> Work:
        draw = torch.Generator(device=device).manual_seed(0)
        q, k, v = (
            random_rows(sum(lengths), number, shape, draw)
            for number in (shape.heads, shape.key_heads, shape.key_heads)
        )
        return FlexRank(q, k, v, causal_mask(document))

    return _row(settings, case, make, causal_pairs(lengths), ideal)


def measure_blocks(
    settings: Settings, case: str, blocks: Blocks, ideal: Ideal | None = None
) -> Row:  # fmt: skip
    """Time anchored blocks on one device."""
    device = settings.device

    def make() -> Work:
        fabric = ReplayFabric("cp", 0, 1, device)
        rank = BlockRank(settings.shape, blocks, fabric, device, backend="auto")
        return FlexRank(*rank.whole(), block_mask(blocks))

    return _row(settings, case, make, blocks.pairs, ideal)


def _row(
    settings: Settings, case: str, make: Callable[[], Work], pairs: int, ideal: Ideal | None
) -> Row:  # fmt: skip
    measured = [measure_rank(settings, make)]
    flops = flops_of(settings.shape, pairs)
    return row_of(settings, case, "FlexAttention", "flex", 1, [0], measured, flops, ideal, 0, None)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)

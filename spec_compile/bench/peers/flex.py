"""torch's FlexAttention on the masks of this package: causal packed rows, and anchored blocks.

Compiled, it is the fastest way to write such a mask by hand on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..blocks import BlockRank, Blocks
from ..replay import ReplayFabric
from ..report import Ideal, Row
from ..rows import Settings, measure_rank, row_of
from ..shards import causal_pairs, flops_of, random_rows
from ..work import Work, consumed

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
        self._mask = create_block_mask(
            mask, None, None, q.shape[0], k.shape[0], device=str(q.device), _compile=compiled
        )  # fmt: skip

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

"""Deal a checked batch to micro-batches, and lay each out over the context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.checked_batch import HOST, CheckedBatch, take_documents
from spec_compile.ir.facts import AttentionFact

from .anchors import AnchorRule, deal_anchors, draw_anchors, padded_anchors
from .attention.host import know
from .balance import Balance, measure_balance
from .kernel_cost import PAIRS, KernelCost
from .layout import RowLayout, deal_documents, plan_layout

PLANNED = ("document", "slots")
"""Vectors that attention is planned from as they are."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole documents of a batch as one packed row, padded with dead rows to ``cp * n``."""

    batch: CheckedBatch
    """On the device."""
    layout: RowLayout
    inputs: dict[str, Any]
    """The stage graphs' batch inputs: whole rows [cp * n] and their live number; without temperature
    and hidden."""
    vectors: dict[str, Tensor]
    """Those of ``inputs``, on the host."""

    @property
    def slots(self) -> Tensor:
        """int64 [cp * n] on the device."""
        slots: Tensor = self.inputs["slots"]
        return slots

    @property
    def num_rows(self) -> int:
        """Rows of each context-parallel rank, n."""
        return self.layout.rows_per_rank

    def rows_of(self, cp_rank: int) -> Tensor:
        """Packed-row index of each of a rank's rows, int64 [n]."""
        n = self.num_rows
        return self.slots[cp_rank * n : (cp_rank + 1) * n]

    def packed(self, by_slot: Tensor) -> Tensor:
        """[cp, n] values in slot order -> [cp * n] in packed-row order."""
        flat = by_slot.reshape(-1)
        return torch.empty_like(flat).index_copy_(0, self.slots, flat)

    def graph_inputs(self) -> dict[str, Any]:
        """``inputs``, for graphs that run now: attention plans from what the host knows of them."""
        for name in PLANNED:
            know(self.inputs[name], self.vectors[name])
        return self.inputs

    def balance(self, attentions: Sequence[AttentionFact]) -> Balance:
        """How evenly these attentions are spread over the ranks."""
        places = [
            x.numpy() if (x := self.vectors.get(name)) is not None else None
            for name in ("anchors", "anchor_slots")
        ]
        return measure_balance(self.layout, self.batch.lengths, attentions, *places)

    def draft_sums(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """What the draft's graph adds to a step: nothing, not 0 / 0, for a micro-batch without tokens."""
        if self.batch.num_tokens:
            return list(sums)
        return [torch.zeros_like(x, requires_grad=x.requires_grad) for x in sums]


def deal(
    checked: CheckedBatch,
    *,
    num_micro_batches: int,
    max_tokens: int | None,
    cp: int,
    anchors: AnchorRule | None = None,
    by_keys: bool = False,
    kernels: KernelCost = PAIRS,
) -> list[MicroBatch]:
    """Make ``num_micro_batches`` micro-batches; a function of lengths, plan and what its kernels cost alone."""
    dealt = deal_documents(checked.lengths, num_micro_batches, max_tokens=max_tokens)
    parts = [take_documents(checked, documents) for documents in dealt]
    layouts = [plan_layout(part.lengths, cp, by_keys=by_keys, kernels=kernels) for part in parts]
    return [
        make_micro_batch(part, cp, anchors, layout)
        for part, layout in zip(parts, layouts, strict=True)
    ]


def make_micro_batch(
    batch: CheckedBatch,
    cp: int,
    anchors: AnchorRule | None = None,
    layout: RowLayout | None = None,
) -> MicroBatch:
    """Lay out one packed row, dead rows last; with a rule also its anchors, given or drawn.

    Without a ``layout``, the one of `plan_layout`.

    Their entries are such that live rows have too, so that a draft meets no number there that it need
    not expect (an index past its tables, a division by T - index). The graphs keep them out by
    ``live_rows``, the number of live ones.
    """
    layout = plan_layout(batch.lengths, cp) if layout is None else layout
    vectors = _vectors(batch, cp, anchors, layout)
    return MicroBatch(batch.moved(), layout, _inputs(batch, vectors), vectors)


def count_inputs(batch: CheckedBatch, anchors: AnchorRule | None) -> dict[str, Any]:
    """``inputs`` of a whole batch on one rank: all that a draft's count reads."""
    return _inputs(batch, _vectors(batch, 1, anchors, plan_layout(batch.lengths, 1)))


def _vectors(
    batch: CheckedBatch, cp: int, anchors: AnchorRule | None, layout: RowLayout
) -> dict[str, Tensor]:
    total = len(layout.slots)
    dead = total - batch.num_tokens

    def padded(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((dead,), value)]) if dead else x

    vectors = {
        "tokens": padded(batch.tokens, 0),
        "positions": padded(batch.positions, 0),
        "document": padded(batch.document, max(batch.num_documents - 1, 0)),
        "index": torch.arange(total, device=HOST),
        "loss_mask": padded(batch.draft_mask, False),
        "slots": torch.from_numpy(layout.slots),
    }
    if anchors is not None:
        drawn = draw_anchors(batch, anchors) if batch.anchors is None else batch.anchors
        filled = padded_anchors(drawn, cp)
        anchor_slots = deal_anchors(filled, batch.positions, cp)
        vectors |= {"anchors": filled, "anchor_slots": anchor_slots}
    return vectors


def _inputs(batch: CheckedBatch, vectors: dict[str, Tensor]) -> dict[str, Any]:
    there = {name: x.to(batch.device, non_blocking=True) for name, x in vectors.items()}
    return {**there, "live_rows": batch.num_tokens}

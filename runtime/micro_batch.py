"""Deal a checked batch to micro-batches, and lay each out over the context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_compile.batch import CheckedBatch, take_documents

from .layout import RowLayout, deal_documents, plan_layout


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole documents of a batch as one packed row, padded with dead rows to ``cp * n``."""

    batch: CheckedBatch
    layout: RowLayout
    inputs: dict[str, Tensor]
    """The stage graphs' batch inputs, whole rows [cp * n]; without temperature and hidden."""
    slots: Tensor
    """int64 [cp * n] on the device."""

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


def deal(
    checked: CheckedBatch, *, num_micro_batches: int, max_tokens: int | None, cp: int
) -> list[MicroBatch]:
    """Make ``num_micro_batches`` micro-batches; a function of lengths and plan alone."""
    dealt = deal_documents(checked.lengths, num_micro_batches, max_tokens=max_tokens)
    return [make_micro_batch(take_documents(checked, documents), cp) for documents in dealt]


def make_micro_batch(batch: CheckedBatch, cp: int) -> MicroBatch:
    """Lay out one packed row; dead rows form one more document of their own, outside every mask."""
    layout = plan_layout(batch.lengths, cp)
    total = len(layout.slots)
    device = batch.tokens.device
    slots = torch.from_numpy(layout.slots).to(device)
    dead = total - batch.num_tokens

    def padded(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((dead,), value)])

    inputs = {
        "tokens": padded(batch.tokens, 0),
        "positions": padded(batch.positions, 0),
        "document": padded(batch.document, batch.num_documents),
        "index": torch.arange(total, device=device),
        "loss_mask": padded(batch.draft_mask, False),
        "slots": slots,
    }
    return MicroBatch(batch, layout, inputs, slots)

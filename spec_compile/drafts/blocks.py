"""Blocks at anchors: what DFlash and DSpark read, and what they are held to.

Legend: T rows of the packed row, A anchors, B slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_compile.contract import DraftInputs
from spec_compile.errors import ConfigError


@dataclass(frozen=True)
class Blocks:
    """Every anchor with its slots; unused anchors (-1) see no row and count for nothing."""

    anchors: Tensor
    """int64 [A]."""
    rows: Tensor
    """int64 [A, B]: the packed row of each slot, the anchor's own first; the last row behind the end."""
    document: Tensor
    """int64 [A]: the anchor's document."""
    positions: Tensor
    """int64 [A, B]."""

    @classmethod
    def of(cls, inputs: DraftInputs, size: int) -> Blocks:
        """Lay blocks of ``size`` slots at the anchors.

        Raises:
            ConfigError: the inputs have no anchors.
        """
        if inputs.anchors is None:
            raise ConfigError(
                "a block draft needs inputs.anchors; give the batch anchors, or run it compiled"
            )
        anchors, slots = inputs.anchors, torch.arange(size, device=inputs.tokens.device)
        first = anchors.clamp_min(0)
        return cls(
            anchors,
            _inside(anchors[:, None] + slots, inputs),
            inputs.document[first],
            inputs.positions[first][:, None] + slots,
        )

    def per_slot(self, x: Tensor) -> Tensor:
        """Repeat each anchor's value [A] over its slots, [A * B]."""
        return x[:, None].expand(-1, self.rows.shape[1]).flatten()

    @property
    def number(self) -> Tensor:
        """int64 [A * B]: which block a slot belongs to."""
        return self.per_slot(torch.arange(self.anchors.shape[0], device=self.anchors.device))

    def targets(self, inputs: DraftInputs, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``ahead`` of the anchors, and whether they may be targets.

        Args:
            inputs: of the draft.
            ahead: int64 [S], how far each is.

        Returns:
            int64 and bool [A, S]: True for valid tokens of the anchor's document.
        """
        rows = self.anchors[:, None] + ahead
        inside = _inside(rows, inputs)
        same = inputs.document[inside] == self.document[:, None]
        real = (self.anchors >= 0)[:, None] & (rows < inputs.tokens.shape[0])
        return inputs.tokens[inside], real & same & inputs.loss_mask[inside]


def by_slot(overlap: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Sums of acceptance and numbers of valid tokens, slot by slot, whatever the loss weighs.

    Args:
        overlap: [A * S], sum of min(p, q) at each slot.
        valid: bool [A, S].
    """
    shares = torch.where(valid, overlap.unflatten(0, (-1, valid.shape[1])), 0.0).sum(0)
    counts = valid.sum(0)
    return slot_stats(list(shares.unbind()), list(counts.unbind()))


def slot_stats(shares: list[Tensor], counts: list[Tensor]) -> dict[str, Tensor]:
    """Name scalars of each slot so that an evaluation finds them."""
    named = {f"slot_acceptance/{j}": share for j, share in enumerate(shares)}
    return named | {f"slot_count/{j}": count for j, count in enumerate(counts)}


def _inside(rows: Tensor, inputs: DraftInputs) -> Tensor:
    return rows.clamp(0, inputs.tokens.shape[0] - 1)

"""How evenly attention is spread over context-parallel ranks, branches included, and how much is padding.

Work is counted at the rank that owns the query row. "pass_q" does it where the keys are: the layout is then one
that spreads both alike, or the strategy is taken only where it is as even. A pair is counted at what it costs the
kernels that the layout was planned for (`kernel_cost`), where that differs from pair to pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spec_compile.ir.facts import AttentionFact

from .layout import RowLayout, Rows

Work = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Balance:
    """Attention work and rows of one or several micro-batches; they add up."""

    peak: float = 0.0
    """Of the busiest rank, attention after attention: ranks wait for each other in each."""
    mean: float = 0.0
    dead_rows: int = 0
    rows: int = 0

    def __add__(self, other: Balance) -> Balance:
        return Balance(
            self.peak + other.peak,
            self.mean + other.mean,
            self.dead_rows + other.dead_rows,
            self.rows + other.rows,
        )

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is perfect."""
        return self.peak / self.mean if self.mean else 1.0

    @property
    def padding(self) -> float:
        """Dead rows over all rows."""
        return self.dead_rows / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        return (
            f"attention work of the busiest rank {self.imbalance:.3f} times the mean, "
            f"{self.padding:.2%} of {self.rows} rows are padding"
        )


CAUSAL = AttentionFact("", "", (1, 1), 1, (), None, "", "")
"""Plain causal attention of every row, for a report without a model."""


def measure_balance(
    layout: RowLayout,
    lengths: Sequence[int],
    attentions: Sequence[AttentionFact] = (CAUSAL,),
    anchors: Rows | None = None,
    anchor_slots: Rows | None = None,
) -> Balance:
    """Count each rank's visible (query, key) pairs, weighted by heads and head dim.

    Causal pairs of rows count as much as ``layout.factors`` says. Pairs of windows and of anchors count once, as
    one kernel serves nearly all of them, and so do branch keys.

    Args:
        layout: of one micro-batch.
        lengths: tokens of its documents, in packed order.
        attentions: that run on it.
        anchors: int64 [A], packed rows, -1 for unused; for attentions whose queries are anchors' slots.
        anchor_slots: int64 [A], the anchor at each slot, by rank.
    """
    position = np.concatenate([np.arange(n) for n in lengths] or [np.zeros(0, np.int64)])
    weights: dict[tuple[int, int | None, int], float] = {}
    for item in attentions:
        kind = (item.slots, item.window, item.branch_keys)
        weights[kind] = weights.get(kind, 0.0) + float(item.heads[0] * item.head_dim)
    total = Balance(0.0, 0.0, len(layout.slots) - layout.num_tokens, len(layout.slots))
    for (slots, window, branch_keys), weight in weights.items():
        if slots and (anchors is None or anchor_slots is None):
            continue
        keys = _main_keys(position, layout, window, (anchors, anchor_slots) if slots else None)
        seeing = keys >= 0
        if layout.factors is not None and window is None and not slots:
            keys = keys * layout.factors.reshape(keys.shape)
        work = np.where(seeing, keys + branch_keys, 0).sum(1) * weight * max(1, slots)
        total += Balance(float(work.max(initial=0)), float(work.mean()))
    return total


def _main_keys(
    position: Rows,
    layout: RowLayout,
    window: int | None,
    anchored: tuple[Rows | None, Rows | None] | None,
) -> Work:
    """Main keys that each rank's queries see, [cp, rows or anchors]; -1 for what is no query."""
    if anchored is None:
        seen, order = position + 1, layout.slots
    else:
        anchors, order = (np.asarray(x) for x in anchored)
        inside = anchors.clip(0, max(0, len(position) - 1))
        seen = np.where(anchors < 0, -1, position[inside] if len(position) else -1)
    live = np.append(seen if window is None else np.minimum(seen, window), -1)
    # dead rows lie past the last
    return live[np.minimum(order, len(live) - 1)].reshape(layout.cp, -1).astype(np.float64)

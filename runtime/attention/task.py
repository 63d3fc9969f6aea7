"""What one call of attention is told beside its tensors, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from spec_compile.ir.traffic import EITHER, RowBytes

from ..fabric import Fabric
from .block_branch import BlockBranch, find_blocks
from .blocks import BlockPlan, cached_plan
from .host import remembered
from .interface import Cut
from .merges import BranchGrads
from .runs import Array
from .visits import Visits, fewest_bytes, visits_of

Branch = BranchGrads
"""Keys and values of a branch, or their gradients."""


@dataclass(frozen=True)
class Task:
    """Everything about one call that is not a differentiable tensor."""

    q_document: Tensor
    q_limit: Tensor
    k_document: Tensor
    slots: Tensor
    live_rows: int
    k_group: Sequence[Tensor]
    q_group: Sequence[Tensor]
    scale: float
    window: int
    kinds: str
    strategy: str
    merge: str
    fabric: str

    def settled(self, fabric: Fabric | None, q: Tensor, k: Tensor, v: Tensor) -> Task:
        """Choose between ring and visits, where the graph leaves it open."""
        if self.strategy != EITHER or fabric is None:
            return self
        row = RowBytes.of(
            heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2], value_dim=v.shape[2],
            itemsize=q.element_size(),
        )  # fmt: skip
        strategy = fewest_bytes(
            self.q_document, self.q_limit, self.k_document, self.slots, window=self.window,
            live_rows=self.live_rows, size=fabric.size, row=row,
        )  # fmt: skip
        if strategy == "pass_q":
            return replace(self, strategy=strategy)
        # a ring needs this rank's rows alone
        limit, document = (
            x.view(fabric.size, -1)[fabric.rank] for x in (self.q_limit, self.q_document)
        )
        return replace(self, strategy=strategy, q_limit=limit, q_document=document)

    def main_plan(self, cut: Cut, owner: int | None = None, size: int = 1) -> BlockPlan:
        """Plan against all main keys, or against those of one rank of the ring."""

        def make(q_document: Array, limit: Array, k_document: Array, slots: Array) -> BlockPlan:
            if owner is None:
                slots = np.arange(len(slots))
            else:
                n = len(slots) // size
                slots = slots[owner * n : (owner + 1) * n]
            low = np.zeros_like(limit) if self.window < 0 else limit - self.window
            high = np.minimum(limit, self.live_rows)
            return cached_plan(q_document, low, high, k_document[slots], slots, cut)

        vectors = (self.q_document, self.q_limit, self.k_document, self.slots)
        return remembered(vectors, ("main", self.window, self.live_rows, owner, size, cut), make)

    def visits(self, cut: Cut, size: int) -> Visits:
        """Which query rows visit which rank's main keys."""
        return visits_of(
            self.q_document, self.q_limit, self.k_document, self.slots, window=self.window,
            live_rows=self.live_rows, size=size, cut=cut,
        )  # fmt: skip

    def in_blocks(self, branches: Sequence[Branch]) -> dict[int, BlockBranch]:
        """The branches, by number, whose groups are proved to be equal blocks."""
        found: dict[int, BlockBranch] = {}
        for i, (key, value) in enumerate(branches):
            sizes: tuple[int, int] | None = (1, 1)
            if self.kinds[i] != "d":
                vectors = (self.q_group[i], self.k_group[i])
                by_row = self.kinds[i] == "r"
                sizes = None if by_row else remembered(vectors, ("blocks",), find_blocks)
            if sizes is not None:
                found[i] = BlockBranch(key, value, *sizes)
        return found

    def branch_plan(self, cut: Cut, i: int) -> BlockPlan:
        """Plan against the keys of a branch that goes by groups."""
        by_row = self.kinds[i] == "r"

        def make(q_group: Array, k_group: Array) -> BlockPlan:
            low, high = np.zeros_like(q_group), np.ones_like(q_group)
            # queries see index 0 alone
            dead = np.arange(len(k_group)) >= self.live_rows if by_row else np.zeros_like(k_group)
            return cached_plan(q_group, low, high, k_group, dead.astype(np.int64), cut)

        vectors = (self.q_group[i], self.k_group[i])
        return remembered(vectors, ("branch", by_row, self.live_rows, cut), make)

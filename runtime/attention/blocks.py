"""Plans attention over one tile of keys: blocks, and intervals for the generated kernel.

A plan is made from the rows' intervals of keys alone, on the host, once for given index vectors; it then
serves every layer and both directions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dense import cut_dense
from .interface import Cut
from .intervals import Intervals
from .masked import cut_masked
from .runs import Array, Block, Mask, find_intervals

CACHED_PLANS = 128


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of one set of index vectors."""

    num_rows: int
    num_keys: int
    order: Array | None
    """Sorts the keys and leaves out those that no row sees; None: they are sorted already."""
    blocks: tuple[Block, ...]
    masks: tuple[Mask, ...]
    num_layers: int
    rest: Intervals | None = None
    """What the blocks leave, on layer 0; None: nothing."""
    _additive: dict[tuple[torch.dtype, torch.device], list[Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _cut: dict[int | None, tuple[Block, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _indices: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    def additive_mask(self, block: Block, like: Tensor) -> Tensor | None:
        """The block's mask as 0 / -inf in the dtype and on the device of ``like``."""
        if block.mask is None:
            return None
        key = (like.dtype, like.device)
        if key not in self._additive:
            self._additive[key] = [
                torch.zeros(mask.shape, dtype=like.dtype)
                .masked_fill_(torch.from_numpy(~mask), -math.inf)
                .to(like.device)
                for mask in self.masks
            ]
        return self._additive[key][block.mask]

    def order_on(self, device: torch.device) -> Tensor | None:
        """``order`` as a tensor."""
        return None if self.order is None else self._on(device, "order", lambda: self.order)

    def places_on(self, device: torch.device) -> Tensor | None:
        """int32 [S]: where ``order`` puts each key; -1 for those that it leaves out."""
        return None if self.order is None else self._on(device, "places", self._places)

    def _places(self) -> npt.NDArray[np.int32]:
        places = np.full(self.num_keys, -1, dtype=np.int32)
        places[self.order] = np.arange(len(places[self.order]))
        return places

    def _on(self, device: torch.device, name: str, make: Callable[[], Any]) -> Tensor:
        if (name, device) not in self._indices:
            self._indices[name, device] = torch.from_numpy(make()).to(device)
        return self._indices[name, device]

    def backward_blocks(self, most_keys: int | None) -> tuple[Block, ...]:
        """The blocks by their keys, so that sums over keys are done early; none has more keys than allowed."""
        if most_keys not in self._cut:
            found = [b for block in self.blocks for b in _cut_keys(block, most_keys)]
            self._cut[most_keys] = tuple(sorted(found, key=lambda b: b.k0))
        return self._cut[most_keys]

    @property
    def covered_by_one_block(self) -> bool:
        """Whether a single block is all there is, for every row."""
        if len(self.blocks) != 1 or self.rest is not None:
            return False
        return (self.blocks[0].q0, self.blocks[0].q1) == (0, self.num_rows)

    @property
    def num_block_keys(self) -> int:
        """Keys of the blocks, each as often as it is in one."""
        return sum(block.k1 - block.k0 for block in self.blocks)

    @property
    def num_scores(self) -> int:
        """Scores that are computed, a head."""
        rest = 0 if self.rest is None else self.rest.num_scores
        return rest + sum((b.q1 - b.q0) * (b.k1 - b.k0) for b in self.blocks)


def _cut_keys(block: Block, most_keys: int | None) -> list[Block]:
    """The block by ranges of at most so many of its keys; a causal or masked one stays whole."""
    if most_keys is None or block.causal or block.mask is not None:
        return [block]
    # from its own first key on: kernels that keep a graph for each length see few of them
    firsts = range(block.k0, block.k1, most_keys)
    return [dataclasses.replace(block, k0=k, k1=min(block.k1, k + most_keys)) for k in firsts]


def plan_blocks(
    q_group: Array, q_low: Array, q_high: Array, k_group: Array, k_index: Array,
    cut: Cut = Cut.MASKED,
) -> BlockPlan:  # fmt: skip
    """Plan: key j is visible to row r iff the groups agree and ``q_low[r] <= k_index[j] < q_high[r]``.

    Args:
        q_group: [R].
        q_low: [R].
        q_high: [R].
        k_group: [S].
        k_index: [S], not negative.
        cut: what the backend wants.
    """
    order, low, high = find_intervals(q_group, q_low, q_high, k_group, k_index)
    sizes = (len(q_group), len(k_group))
    if cut is Cut.MASKED:
        masked, masks, layers = cut_masked(low, high)
        return BlockPlan(*sizes, order, tuple(masked), tuple(masks), layers)
    if cut is Cut.DENSE:
        blocks, rest, layers = cut_dense(low, high, len(k_group))
        return BlockPlan(*sizes, order, tuple(blocks), (), layers, rest)
    rest = Intervals(low, high, len(k_group)) if np.any(high > low) else None
    return BlockPlan(*sizes, order, (), (), int(rest is not None), rest)


def cached_plan(
    q_group: Array, q_low: Array, q_high: Array, k_group: Array, k_index: Array,
    cut: Cut = Cut.MASKED,
) -> BlockPlan:  # fmt: skip
    """`plan_blocks`, remembered by the contents of the index vectors."""
    digest = hashlib.blake2b(cut.name.encode(), digest_size=16)
    for array in (q_group, q_low, q_high, k_group, k_index):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    key = digest.digest()
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    plan = plan_blocks(q_group, q_low, q_high, k_group, k_index, cut)
    with _lock:
        _plans[key] = plan
        while len(_plans) > CACHED_PLANS:
            _plans.popitem(last=False)
    return plan


_plans: OrderedDict[bytes, BlockPlan] = OrderedDict()
_lock = threading.Lock()

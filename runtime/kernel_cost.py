"""What attention over a piece of a document costs: GPU kernels take large blocks of it faster than the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from spec_compile.ir.facts import AttentionFact

from .attention.backends import BACKENDS, backend_for
from .attention.dense import LEAST_SCORES, Length, friendly
from .attention.interface import Cut

SLOWDOWN = 2
"""Time of a pair outside the dense blocks over that of one inside. Fitted on an H200 to ranks' times (bf16, head
dim 128, cuDNN beside the generated kernel): 1.9 forward, 2.4 backward. Whole, as planning counts in integers."""


@dataclass(frozen=True)
class KernelCost:
    """Cost of neighbouring rows of one document that attend to it causally, in pairs of the fast kernel.

    The defaults count pairs: all cost the same.
    """

    least_scores: int = 0
    """Scores of the smallest block that the fast kernel takes; ``attention.dense`` cuts them out."""
    factor: int = 1
    """What a pair costs outside of such blocks."""

    def of(self, low: int, high: int) -> int:
        """Cost of the rows at positions ``low`` up to ``high``, which see all keys from 0 to their own."""
        pairs = (high * (high + 1) - low * (low + 1)) // 2
        if self.factor == 1 or high * high // 2 < self.least_scores:  # no block is as large
            return self.factor * pairs
        return self.factor * pairs - self.saved(low, high)

    def saved(self, low: Length, high: Length) -> Length:
        """What of the cost the fast kernel saves, by piece."""
        if self.factor == 1:
            return high * 0
        rows, keys = friendly(high - low), friendly(low)
        square = rows * (rows + 1) // 2 * (rows * rows // 2 >= self.least_scores)
        scores = rows * keys
        return (self.factor - 1) * (square + scores * (scores >= self.least_scores))


PAIRS = KernelCost()
DENSE = KernelCost(LEAST_SCORES, SLOWDOWN)


def kernel_cost(backends: Collection[str]) -> KernelCost:
    """What evens out the time of attentions that these backends serve; pairs, unless all of them are cut DENSE."""
    cuts = {BACKENDS[name].cut for name in backends}
    return DENSE if cuts == {Cut.DENSE} else PAIRS


def cost_on(
    device: torch.device, dtype: torch.dtype, attentions: Collection[AttentionFact], requested: str
) -> KernelCost:
    """The cost that a step's layouts even out on this device, by the backends of its attentions of whole rows.

    Windows and anchors' slots do not count: what they leave of a document has no large blocks.

    Args:
        device: of the model.
        dtype: of q, k and v.
        attentions: of the step.
        requested: "auto", or the name of the backend that must serve.
    """
    if device.type == "meta":
        return PAIRS
    plain = [item for item in attentions if item.window is None and not item.slots]
    dims = {(item.head_dim, item.value_dim or item.head_dim) for item in plain}
    return kernel_cost({backend_for(device, dtype, *dim, requested) for dim in dims})

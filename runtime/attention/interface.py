"""The declared interface of attention kernels.

The contract of every backend: tensors are [rows, heads, dim]; lse is [rows, heads], natural log, in
fp32 (fp64 for fp64), -inf for a row that sees no key, whose output is 0. The backward takes the
*merged* out and lse of the whole softmax, of which these keys may be a part; there +inf marks a row
that sees nothing anywhere. Query heads are a multiple of key heads and are never expanded.
"""

from __future__ import annotations

import enum
import logging
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_fallbacks: dict[str, None] = {}


class Cut(enum.Enum):
    """How a backend wants the work of one tile of keys cut."""

    MASKED = enum.auto()
    """Blocks, some under a small dense mask: cheap calls."""
    DENSE = enum.auto()
    """Few large blocks without masks; what is left over goes to the generated kernel at once."""
    INTERVALS = enum.auto()
    """No blocks: the generated kernel takes everything in one launch."""


class Backend(Protocol):
    """Forward and backward of one block of attention; see the module's contract."""

    name: str
    device_type: str | None
    """Where it runs, such as "cuda"; None for anywhere."""
    cut: Cut
    most_keys: int | None
    """Of one call of the backward, causal ones aside; None for any number."""

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse); ``mask`` [rows, keys] is added to the scores, and given to MASKED only."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of these keys, given the merged ``out`` and ``lse``."""


def record_fallback(text: str) -> None:
    """Log a fallback once, and keep it for `fallbacks`."""
    if text not in _fallbacks:
        _fallbacks[text] = None
        log.warning("%s", text)


def fallbacks() -> tuple[str, ...]:
    """Every fallback taken in this process, oldest first."""
    return tuple(_fallbacks)


def batched(x: Tensor) -> Tensor:
    """[rows, heads, ...] -> [1, heads, rows, ...], as ATen's kernels want it; a view."""
    return x.transpose(0, 1)[None]


def unbatched(x: Tensor) -> Tensor:
    """[1, heads, rows, ...] -> [rows, heads, ...]; a view."""
    return x[0].transpose(0, 1)

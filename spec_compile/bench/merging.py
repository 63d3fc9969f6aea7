"""Merges against the device's own copy bandwidth, and branches fused with them against a separate step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec_compile.runtime.attention.block_branch import BlockBranch
from spec_compile.runtime.attention.merges import merge, merge_backend
from spec_compile.runtime.attention.tiles import Partial

from .timing import Timing, measure

GROUP = 4
"""Query heads a key head in the fused cases."""
CASES = {"1 diagonal": (1, 1), "6 diagonals": (6, 1), "blocks of 16": (1, 16)}
"""Number of branches, and rows and keys of a block."""


@dataclass(frozen=True)
class FusedRow:
    """One main partial merged with branches that the merge scores itself."""

    case: str
    fused: Timing
    separate: Timing
    """Each branch as a partial of its own by the same kernels, then one merge of them all."""
    fused_bytes: int
    separate_bytes: int

    def text(self, copy_tbps: float) -> str:
        """One line; shares are of the bytes that a copy moves in the time."""
        shares = (
            moved / time.median / 1e9 / copy_tbps
            for moved, time in (
                (self.fused_bytes, self.fused), (self.separate_bytes, self.separate)
            )
        )  # fmt: skip
        fused, separate = shares
        return (
            f"merge fused with {self.case}: {self.fused} ms, {self.fused_bytes / 1e9:.3f} GB, share {fused:.1%}; "
            f"apart: {self.separate} ms, {self.separate_bytes / 1e9:.3f} GB, share {separate:.1%}"
        )


@dataclass(frozen=True)
class MergeRow:
    """One two-way merge, and what fusing branches with a merge saves."""

    rows: int
    time: Timing
    copy_tbps: float
    """Bytes read and written by a large copy, TB/s."""
    merge_tbps: float
    fused: list[FusedRow] = field(default_factory=list)

    def __str__(self) -> str:
        share = self.merge_tbps / self.copy_tbps
        first = (
            f"merge of two [{self.rows}, heads, dim]: {self.time} ms, {self.merge_tbps:.3f} TB/s; "
            f"copy {self.copy_tbps:.3f} TB/s; share {share:.1%}"
        )
        return "\n".join([first, *(row.text(self.copy_tbps) for row in self.fused)])


def measure_merge(
    rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> MergeRow:
    """Merge two partials of ``rows`` rows into one; then one partial and branches, fused and apart."""
    partials = [_partial(rows, heads, dim, dtype, device) for _ in range(2)]
    time = measure(_merge(partials, partials[0].out, [], device), device, repeats)
    moved = 3 * _bytes(partials[0])
    source = torch.randn(moved // 4, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, repeats)
    copied = 2 * source.numel() * source.itemsize
    fused = [
        _measure_fused(case, partials[0], count, size, device, repeats)
        for case, (count, size) in CASES.items()
    ]
    return MergeRow(rows, time, copied / copy.median / 1e9, moved / time.median / 1e9, fused)


def _measure_fused(
    case: str, main: Partial, count: int, size: int, device: torch.device, repeats: int
) -> FusedRow:
    rows, heads, dim = main.out.shape
    key_shape = (rows, max(1, heads // GROUP), dim)
    q, *keys = (
        torch.randn(shape, device=device, dtype=main.out.dtype)
        for shape in (main.out.shape, *[key_shape] * (2 * count))
    )
    branches = [BlockBranch(keys[2 * i], keys[2 * i + 1], size, size) for i in range(count)]
    alone = [_merge([], q, [branch], device) for branch in branches]

    def apart() -> Partial:
        return _merge([main, *(attend() for attend in alone)], q, [], device)()

    fused = measure(_merge([main], q, branches, device), device, repeats)
    separate = measure(apart, device, repeats)
    inputs = sum(x.numel() * x.itemsize for x in keys) + 2 * _bytes(main)
    query = q.numel() * q.itemsize
    # apart, each branch reads the queries again, and its own partial is written and read
    more = (count - 1) * query + 2 * count * _bytes(main)
    return FusedRow(case, fused, separate, inputs + query, inputs + query + more)


def _merge(
    partials: list[Partial], q: Tensor, branches: list[BlockBranch], device: torch.device
) -> Callable[[], Partial]:
    backend = merge_backend(device)
    return lambda: merge(
        partials, q=q, scale=q.shape[2] ** -0.5, out_dtype=q.dtype, backend=backend,
        branches=branches,
    )  # fmt: skip


def _partial(rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Partial:
    out = torch.randn(rows, heads, dim, device=device, dtype=dtype)
    return Partial(out, torch.randn(rows, heads, device=device))


def _bytes(partial: Partial) -> int:
    return sum(x.numel() * x.itemsize for x in (partial.out, partial.lse))

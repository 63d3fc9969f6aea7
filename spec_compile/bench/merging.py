"""The two-way merge against the device's own copy bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_compile.runtime.attention.merges import merge, merge_backend
from spec_compile.runtime.attention.tiles import Partial

from .timing import Timing, measure


@dataclass(frozen=True)
class MergeRow:
    """One two-way merge."""

    rows: int
    time: Timing
    copy_tbps: float
    """Bytes read and written by a large copy, TB/s."""
    merge_tbps: float

    def __str__(self) -> str:
        share = self.merge_tbps / self.copy_tbps
        return (
            f"merge of two [{self.rows}, heads, dim]: {self.time} ms, {self.merge_tbps:.3f} TB/s; "
            f"copy {self.copy_tbps:.3f} TB/s; share {share:.1%}"
        )


def measure_merge(
    rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> MergeRow:
    """Merge two partials of ``rows`` rows into one."""
    partials = [
        Partial(
            torch.randn(rows, heads, dim, device=device, dtype=dtype),
            torch.randn(rows, heads, device=device),
        )
        for _ in range(2)
    ]
    backend = merge_backend(device)
    time = measure(
        lambda: merge(partials, q=partials[0].out, scale=1.0, out_dtype=dtype, backend=backend),
        device, repeats,
    )  # fmt: skip
    out, lse = partials[0].out, partials[0].lse
    moved = 3 * (out.numel() * out.itemsize + lse.numel() * lse.itemsize)
    source = torch.randn(moved // 4, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, repeats)
    copied = 2 * source.numel() * source.itemsize
    return MergeRow(rows, time, copied / copy.median / 1e9, moved / time.median / 1e9)

"""EAGLE-3's training-time test: passes over the same main keys with one more branch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import Ideal, Row, measure_case
from .shards import Shape, useful_flops
from .timing import Timing


def measure_passes(
    case: str, shape: Shape, lengths: Sequence[int], cp: int, device: torch.device, ideal: Ideal, *,
    backend: str, num_passes: int, repeats: int,
) -> Row:  # fmt: skip
    """Time all passes of rank 0, the last with ``num_passes - 1`` branches; shares count main keys only."""
    rows = [
        measure_case(
            case,
            shape,
            lengths,
            cp,
            device,
            ideal,
            strategy="all_gather",
            backend=backend,
            ranks=[0],
            repeats=repeats,
            branches=branches,
        )
        for branches in range(num_passes)
    ]
    zero = Timing(0.0, 0.0, 0.0)
    forward = sum((row.forward for row in rows), zero)
    backward = sum((row.backward for row in rows), zero)
    flops = [num_passes * f / cp for f in useful_flops(shape, lengths)]
    rates = [f / t.median / 1e9 for f, t in zip(flops, (forward, backward), strict=True)]
    return Row(
        case, rows[0].backend, cp, "all_gather", forward, backward, rates[0], rates[1],
        rates[0] / ideal.forward, rates[1] / ideal.backward, max(row.peak_gib for row in rows),
    )  # fmt: skip

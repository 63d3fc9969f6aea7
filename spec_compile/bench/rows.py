"""How every rank's work of one run is measured, and the row that comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_compile.runtime.attention.backends import BACKENDS, backend_for
from spec_compile.runtime.attention.interface import Backend

from .report import Ideal, Row, slowest
from .shards import Shape, causal_pairs, flops_of
from .timing import measure
from .work import Measured, Work, measure_work


@dataclass(frozen=True)
class Settings:
    """How everything of one run is measured."""

    shape: Shape
    device: torch.device
    repeats: int = 5
    budget_s: float = 20.0
    """For the timed calls of one rank."""
    all_ranks: bool = True
    """False: only those that can be the slowest."""
    link_gb_s: float = 380.0
    """Assumed for the exchange."""


def ideal_rates(settings: Settings, rows: int) -> Ideal:
    """Measure the fastest backend here on one causal document."""
    shape, device = settings.shape, settings.device
    name = backend_for(device, shape.dtype, shape.dim, shape.dim)
    backend: Backend = BACKENDS[name]
    q, k, v, grad = (
        torch.randn(rows, heads, shape.dim, device=device, dtype=shape.dtype)
        for heads in (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    )
    scale = shape.dim**-0.5
    out, lse = backend.forward(q, k, v, mask=None, causal=True, scale=scale)
    out, lse = out.contiguous(), lse.contiguous()
    calls: list[Callable[[], object]] = [
        lambda: backend.forward(q, k, v, mask=None, causal=True, scale=scale),
        lambda: backend.backward(
            grad, q, k, v, out, lse, mask=None, causal=True, scale=scale
        ),
    ]  # fmt: skip
    flops = flops_of(shape, causal_pairs([rows]))
    rates = [
        f / measure(call, device, settings.repeats).median / 1e9
        for f, call in zip(flops, calls, strict=True)
    ]
    return Ideal(name, rows, *rates)


def measure_rank(
    settings: Settings, make: Callable[[], Work], pool_bytes: Callable[[Any], int] = lambda work: 0
) -> Measured:
    """Measure one rank's work with the settings of the run."""
    return measure_work(
        make,
        settings.device,
        settings.repeats,
        budget_s=settings.budget_s,
        uncounted_bytes=pool_bytes,
    )


def row_of(
    settings: Settings, case: str, what: str, kernel: str, cp: int, ranks: Sequence[int],
    measured: list[Measured], flops: tuple[int, int], ideal: Ideal | None, needed: int,
    one_device: Row | None,
) -> Row:  # fmt: skip
    """Sum up the ranks that ran."""
    forward, backward, total = slowest(measured)
    peaks = (
        _largest(m.forward_peak_bytes for m in measured),
        _largest(m.peak_bytes for m in measured),
    )
    efficiency = None if one_device is None else one_device.total.median / cp / total.median
    return Row(
        case, what, kernel, cp, tuple(ranks), forward, backward, total, flops,
        None if ideal is None else (ideal.forward, ideal.backward),
        (max(m.sent_forward for m in measured), max(m.sent_backward for m in measured)),
        settings.link_gb_s, *peaks, needed, efficiency,
    )  # fmt: skip


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)

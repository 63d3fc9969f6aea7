"""Context-parallel attention, rank by rank on one device, against one dense kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from spec_compile.runtime.attention.backends import BACKENDS, backend_for
from spec_compile.runtime.attention.interface import Backend

from .shards import RankAttention, Shape, useful_flops
from .timing import Timing, measure


@dataclass(frozen=True)
class Row:
    """One measured case; times are of the slowest rank."""

    case: str
    backend: str
    cp: int
    strategy: str
    forward: Timing
    backward: Timing
    forward_tflops: float
    """Useful TFLOP/s a device, with the slowest rank's time."""
    backward_tflops: float
    forward_share: float
    """Of the rate of one dense kernel over one causal document, measured in the same run."""
    backward_share: float
    peak_gib: float
    """Largest over the ranks, inputs included; 0 without a GPU."""

    HEADER = (
        "case                     backend    cp strategy   forward ms              backward ms"
        "             TFLOP/s fwd  bwd   of ideal fwd  bwd   peak GiB"
    )

    def __str__(self) -> str:
        return (
            f"{self.case:24} {self.backend:10} {self.cp:2} {self.strategy:10} {self.forward!s:23} "
            f"{self.backward!s:23} {self.forward_tflops:10.4g} {self.backward_tflops:6.4g} "
            f"{self.forward_share:11.1%} {self.backward_share:6.1%} {self.peak_gib:9.2f}"
        )


@dataclass(frozen=True)
class Ideal:
    """Rates of one dense causal kernel, in TFLOP/s."""

    backend: str
    rows: int
    forward: float
    backward: float

    def __str__(self) -> str:
        return (
            f"ideal: {self.backend}, one causal block of {self.rows} rows: "
            f"{self.forward:.4g} TFLOP/s forward, {self.backward:.4g} backward"
        )


def ideal_rates(shape: Shape, rows: int, device: torch.device, repeats: int) -> Ideal:
    """Measure the fastest backend here on one causal document."""
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
    rates = [
        flops / measure(call, device, repeats).median / 1e9
        for flops, call in zip(useful_flops(shape, [rows]), calls, strict=True)
    ]
    return Ideal(name, rows, *rates)


def measure_case(
    case: str, shape: Shape, lengths: Sequence[int], cp: int, device: torch.device, ideal: Ideal, *,
    strategy: str, backend: str, ranks: Iterable[int], repeats: int, branches: int = 0,
) -> Row:  # fmt: skip
    """Time the given ranks one after the other; the slowest one counts."""
    times: list[tuple[Timing, Timing]] = []
    peak = 0.0
    for rank in ranks:
        work = RankAttention(
            shape, lengths, cp, rank, device, strategy=strategy, backend=backend, branches=branches
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        forward = measure(work.forward, device, repeats)
        out = work.forward()
        backward = measure(lambda out=out, work=work: work.backward(out), device, repeats)  # type: ignore[misc]
        times.append((forward, backward))
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(device) / 2**30)
        del work, out
    forward, backward = (max((pair[i] for pair in times), key=lambda t: t.median) for i in range(2))
    flops = useful_flops(shape, lengths)
    rates = [f / cp / t.median / 1e9 for f, t in zip(flops, (forward, backward), strict=True)]
    name = backend_for(device, shape.dtype, shape.dim, shape.dim, backend)
    return Row(
        case, name, cp, strategy, forward, backward, rates[0], rates[1],
        rates[0] / ideal.forward, rates[1] / ideal.backward, peak,
    )  # fmt: skip


def measure_matrix(
    shape: Shape, cases: dict[str, Sequence[int]], device: torch.device, ideal: Ideal, *,
    cps: Sequence[int], strategies: Sequence[str], backends: Sequence[str], repeats: int,
) -> Iterator[Row]:  # fmt: skip
    """Yield a row a case, backend, size and strategy; the strategies are one at size 1."""
    for case, lengths in cases.items():
        for backend in backends:
            for cp in cps:
                for strategy in strategies if cp > 1 else strategies[:1]:
                    yield measure_case(
                        case, shape, lengths, cp, device, ideal, strategy=strategy, backend=backend,
                        ranks=range(cp), repeats=repeats,
                    )  # fmt: skip

"""What taps cost a step of two stages on GPUs: with its channels, and with taps that cost nothing."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.runtime.model import ParallelModel

from .goals import OF_STEP
from .timing import Timing
from .two_processes import stream

VOCABULARY = 32000
"""Ids that batches draw from; models need as many."""
WARMUP = 2
PAIRS = 3
"""Of steps, a repeat: a small share of a step takes many to tell from how steps differ among themselves."""
Build = Callable[[int, torch.device], ParallelModel]
"""Builds the model of a hidden size on a device, in a process that was launched as a rank."""


def measure_step_cost(
    build: Build, hidden_sizes: Sequence[int], tokens: int, repeats: int
) -> Iterator[str]:
    """Yield a line a hidden size, then one a goal.

    Args:
        build: a function of a module, so that fresh processes find it; its plan has two stages.
        hidden_sizes: given to ``build``.
        tokens: of a batch, in eight documents.
        repeats: `PAIRS` steps of either kind each.
    """
    yield "hidden   step ms                 taps at no cost ms      transport adds (middle half of the pairs)"
    added = {}
    lines = stream(_measure_steps, build, tuple(hidden_sizes), tokens, repeats)
    for hidden, (_, (line, ratio)) in zip(hidden_sizes, lines, strict=True):
        added[hidden] = ratio
        yield line
    for hidden, ratio in added.items():
        yield OF_STEP.judge(f"hidden {hidden}", 100 * (ratio - 1))


class _FreeTaps:
    """Channels that move nothing: values of the right shape, made once."""

    def __init__(self) -> None:
        self._made: dict[Any, Tensor] = {}

    def begin_step(self, *arguments: Any, **options: Any) -> None:
        """Nothing to open."""

    def push(self, source: int, micro_batch: int, values: list[Tensor]) -> None:
        """Drop them."""

    def pull(self, source: int, micro_batch: int, like: list[Tensor]) -> list[Tensor]:
        """Give something of that shape."""
        return [self._value(source, i, x) for i, x in enumerate(like)]

    def release(self, micro_batch: int) -> None:
        """Nothing is held."""

    def _value(self, source: int, i: int, like: Tensor) -> Tensor:
        key = (source, i, tuple(like.shape))
        if key not in self._made:
            device = torch.device("cuda", torch.cuda.current_device())
            self._made[key] = torch.randn(like.shape, dtype=like.dtype, device=device)
        return self._made[key].detach()


def _measure_steps(
    rank: int, build: Build, hidden_sizes: Sequence[int], tokens: int, repeats: int
) -> Iterator[tuple[str, float]]:
    """One size after the other; starting a process takes as long as measuring one."""
    for hidden in hidden_sizes:
        yield _measure_step(build, hidden, tokens, repeats)
        gc.collect()
        torch.cuda.empty_cache()  # the other process may have the same GPU


def _measure_step(build: Build, hidden: int, tokens: int, repeats: int) -> tuple[str, float]:
    device = torch.device("cuda", torch.cuda.current_device())
    model = build(hidden, device)
    batch = _batch(tokens, device)
    real = model._caller.taps
    free_taps: Any = _FreeTaps()
    times: dict[str, list[float]] = {"real": [], "free": []}
    for turn in range(PAIRS * repeats + WARMUP):
        for name in sorted(times, reverse=turn % 2 == 1):  # each goes first as often as the other
            model._caller.taps = real if name == "real" else free_taps
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.step(batch, _loss)
            torch.cuda.synchronize()
            if turn >= WARMUP:
                times[name].append((time.perf_counter() - start) * 1e3)
    model._caller.taps = real
    model.close()
    cost, free = (Timing.of(times[name]) for name in ("real", "free"))
    # the ratio within a pair: both were measured under the same conditions
    pairs = [a / b for a, b in zip(times["real"], times["free"], strict=True)]
    low, ratio, high = statistics.quantiles(pairs, n=4)
    spread = f"{low - 1:+.2%} to {high - 1:+.2%}"
    return f"{hidden:6}   {cost!s:23} {free!s:23} {ratio - 1:+.2%} ({spread})", ratio


def _loss(rows: TokenOutputs) -> Tensor:
    return -(rows.logprobs * rows.mask).sum()


def _batch(tokens: int, device: torch.device) -> PackedBatch:
    length = tokens // 8
    return PackedBatch(
        torch.randint(0, VOCABULARY, (tokens,), device=device, generator=torch.Generator(device)),
        torch.arange(0, tokens + 1, length, device=device),
        torch.ones(tokens, dtype=torch.bool, device=device),
    )

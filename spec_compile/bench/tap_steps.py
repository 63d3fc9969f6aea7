"""What taps cost a step of two stages on GPUs: with its channels, and with taps that cost nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.runtime.model import ParallelModel

from .goals import OF_STEP
from .paired import Excess, in_turn
from .tap_pair import WAIT_S
from .timing import Timing
from .two_processes import stream

VOCABULARY = 32000
"""Ids that batches draw from; models need as many."""
PAIRS = 3
"""Of steps, a repeat, at least."""
ENOUGH = 0.005
"""Half the interval that the excess is known to lie in: a quarter of what it may be."""
MOST_PAIRS = 200
Build = Callable[[int, torch.device], ParallelModel]
"""Builds the model of a hidden size on a device, in a process that was launched as a rank."""


def measure_step_cost(
    build: Build, hidden_sizes: Sequence[int], tokens: int, repeats: int
) -> Iterator[str]:
    """Yield a line a hidden size, then one a goal.

    Args:
        build: a function of a module, so that fresh processes find it; its plan has two stages.
        hidden_sizes: given to ``build``.
        tokens: of a batch, in eight documents or fewer.
        repeats: `PAIRS` steps of either kind each at least; more until `ENOUGH` is known.
    """
    yield "hidden   step ms                 taps at no cost ms      transport adds (95 % interval of the median)"
    added: dict[int, Excess] = {}
    rows = stream(_measure_steps, build, tuple(hidden_sizes), tokens, PAIRS * repeats)
    for hidden, (_, (cost, free, excess)) in zip(hidden_sizes, rows, strict=True):
        added[hidden] = excess
        yield f"{hidden:6}   {cost!s:23} {free!s:23} {excess}"
    for hidden, excess in added.items():
        interval = 100 * excess.low, 100 * excess.high
        yield OF_STEP.judge(f"hidden {hidden}", 100 * excess.median, interval)


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
    rank: int, build: Build, hidden_sizes: Sequence[int], tokens: int, least_pairs: int
) -> Iterator[tuple[Timing, Timing, Excess]]:
    """One size after the other; starting a process takes as long as measuring one."""
    for hidden in hidden_sizes:
        yield _measure_step(build, hidden, tokens, least_pairs)
        gc.collect()
        torch.cuda.empty_cache()  # the other process may have the same GPU


def _measure_step(
    build: Build, hidden: int, tokens: int, least_pairs: int
) -> tuple[Timing, Timing, Excess]:
    """Steps with taps, steps with taps that cost nothing, and how they compare; the same on both ranks."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = build(hidden, device)
    batch = _batch(tokens, device)
    real = model._caller.taps
    free: Any = _FreeTaps()

    def time_step(taps: Any) -> float:
        model._caller.taps = taps
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.step(batch, _loss)
        torch.cuda.synchronize()
        spent = time.perf_counter() - start
        slowest: float = max(model._world.control.all_gather(spent, deadline_s=WAIT_S))
        return 1e3 * slowest

    try:
        with_taps, without = in_turn(
            lambda: time_step(real), lambda: time_step(free), least_pairs, MOST_PAIRS, ENOUGH
        )
    finally:
        model._caller.taps = real
        model.close()
    return Timing.of(with_taps), Timing.of(without), Excess.of(with_taps, without)


def _loss(rows: TokenOutputs) -> Tensor:
    return -(rows.logprobs * rows.mask).sum()


def _batch(tokens: int, device: torch.device) -> PackedBatch:
    length = max(1, -(-tokens // 8))
    return PackedBatch(
        torch.randint(0, VOCABULARY, (tokens,), device=device, generator=torch.Generator(device)),
        torch.tensor([*range(0, tokens, length), tokens], device=device),
        torch.ones(tokens, dtype=torch.bool, device=device),
    )

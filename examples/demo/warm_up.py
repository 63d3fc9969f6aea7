"""Train the fresh draft alone on the target's completions, and measure what it is good for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import spec_compile as sc
from spec_compile import grpo

from .processes import everyone
from .samples import Samples, pack, warm_up_batches
from .show import Clock, bar, say
from .task import Workload

SEED = 1


@dataclass(frozen=True)
class Acceptance:
    """How well a draft does on the held-out prompts."""

    steps: int
    """Draft steps trained so far."""
    predicted: list[float]
    """Mean of sum_v min(p_v, q_v) at each position, on completions of the target."""
    measured: list[float]
    """Share accepted at each position where all earlier ones were accepted, by the engine."""
    length: float
    """Tokens a verification, 1 + accepted ones, measured."""

    @property
    def predicted_length(self) -> float:
        """Tokens a verification when acceptance at each position is as predicted."""
        length, chance = 1.0, 1.0
        for share in self.predicted:
            chance *= share
            length += chance
        return length


def warm_up(
    model: sc.ParallelModel,
    engine: sc.Engine,
    work: Workload,
    samples: Samples,
    optimizer: torch.optim.Optimizer,
    steps: int,
    clock: Clock,
) -> list[Acceptance]:
    """Train ``steps`` draft steps; measures before and after."""
    batches = warm_up_batches(work, samples, (model.dp_rank, model.dp_size))
    found = [measure(model, engine, work, samples, 0, clock)]
    for step in range(1, steps + 1):
        with clock.phase("draft warm-up", beat=False):
            result = model.step(batches[step % len(batches)], None)
            model.clip_grad_norm_(draft=1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        left = (steps - step) * clock.seconds["draft warm-up"] / step
        accepted = result.metrics["step/draft_acceptance/0"]
        say(
            f"draft step {step:>3}/{steps} | loss {result.draft_loss:7.3f} | predicted acceptance "
            f"{accepted:.3f} {bar(accepted)} | {left:3.0f} s left"
        )
    return [*found, measure(model, engine, work, samples, steps, clock)]


def measure(
    model: sc.ParallelModel,
    engine: sc.Engine,
    work: Workload,
    samples: Samples,
    steps: int,
    clock: Clock,
) -> Acceptance:
    """Let the engine draft on the held-out prompts, and predict from the target's own completions."""
    with clock.phase("weights"):
        engine.update_weights("draft", model.export_weights("draft"), steps)
    with clock.phase("measuring acceptance"):
        held_out = samples.held_out[model.dp_rank :: model.dp_size]
        predicted = model.evaluate(pack(work.held_out, held_out)).acceptance
        engine.stats  # noqa: B018  reading starts the counts anew
        grpo.generate(model, engine, work.held_out.ids, work.measuring(SEED))
        drafted, accepted, rounds = _totals(engine)
    before = [drafted[0], *accepted]
    measured = [a / b if b else 0.0 for a, b in zip(accepted, before, strict=False)]
    return Acceptance(steps, predicted, measured, 1 + sum(accepted) / max(rounds, 1))


def table(found: list[Acceptance]) -> list[str]:
    """Lines with predicted and measured acceptance, side by side."""
    positions = range(1, len(found[0].predicted) + 1)
    heads = "".join(f"{f'position {i}':>16}" for i in positions)
    lines = [
        f"  draft steps{heads}{'tokens a verification':>26}",
        "             predicted / measured",
    ]
    for one in found:
        pairs = zip(one.predicted, one.measured, strict=True)
        cells = "".join(f"{f'{p:.2f} / {m:.2f}':>16}" for p, m in pairs)
        lengths = f"{one.predicted_length:.2f} / {one.length:.2f}"
        lines.append(f"  {one.steps:>11}{cells}{lengths:>26}")
    return lines


def _totals(engine: sc.Engine) -> tuple[list[int], list[int], int]:
    """Drafted and accepted tokens by position, and verifications, of all ranks."""
    stats = engine.stats
    parts = everyone((stats["drafted"], stats["accepted"], stats["verify_steps"]))
    drafted, accepted = (
        [sum(column) for column in zip(*(part[i] for part in parts), strict=True)] for i in (0, 1)
    )
    return drafted, accepted, sum(part[2] for part in parts)

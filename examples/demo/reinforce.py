"""GRPO with the draft trained beside the policy, and the same steps with the draft frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import spec_compile as sc
from spec_compile import grpo

from .processes import everyone
from .show import Clock, say
from .task import Questions, Workload

SEED = 2


@dataclass(frozen=True)
class HeldOut:
    """Rewards on the held-out prompts, and completions to look at."""

    rewards: list[list[float]]
    """[prompts][samples]."""
    shown: list[tuple[str, str, float]]
    """Prompt, completion, reward."""

    @property
    def mean(self) -> float:
        """Mean reward."""
        return sum(sum(group) for group in self.rewards) / sum(len(g) for g in self.rewards)

    @property
    def half_width(self) -> float:
        """Half of a 95 % interval of the mean: prompts are the independent draws."""
        means = torch.tensor([sum(group) / len(group) for group in self.rewards])
        return 1.96 * float(means.std()) / math.sqrt(len(means))


def train(
    trainer: grpo.Trainer, work: Workload, steps: int, clock: Clock, label: str
) -> list[dict[str, float]]:
    """Do GRPO steps, the training prompts in turn; prints a line a step."""
    found = []
    for step in range(steps):
        with clock.phase(f"GRPO, {label}", beat=False):
            questions = _next(work, step)
            metrics = trainer.step(questions.ids, questions.columns)
        found.append(metrics)
        spent = sum(metrics[name] for name in metrics if name.startswith("seconds/"))
        say(f"{label:10} {step + 1}/{steps} | {_line(metrics)} | {spent:4.1f} s")
    return found


def held_out(model: sc.ParallelModel, engine: sc.Engine, work: Workload, clock: Clock) -> HeldOut:
    """Answer the held-out prompts and score the answers."""
    with clock.phase("held-out reward"):
        rollouts = grpo.generate(model, engine, work.held_out.ids, work.measuring(SEED))
        mine = rollouts if model.lowered.plan.dp == 1 else _of_all(model, rollouts)
        scorer = grpo.Scorer(work.reward, work.tokenizer)
        questions = work.held_out
        rewarded = scorer.score(questions.ids, questions.columns, mine)
        scored = [grpo.Scored(*pair) for pair in zip(mine, rewarded, strict=True)]
    n = work.held_out_samples
    rewards = [[one.reward for one in scored[i : i + n]] for i in range(0, len(scored), n)]
    shown = [_readable(work, one) for one in scored[:: 2 * n][:3]]
    return HeldOut(rewards, shown)


def plain_decoding_rate(model: sc.ParallelModel, engine: sc.Engine, work: Workload) -> float:
    """Tokens a second of the same engine without drafting, on the prompts of one step."""
    chosen = engine.num_speculative_tokens
    engine.num_speculative_tokens = 0
    engine.stats  # noqa: B018  reading starts the counts anew
    grpo.generate(model, engine, _next(work, 0).ids, work.sampling())
    engine.num_speculative_tokens = chosen
    stats = engine.stats
    parts = everyone((stats["tokens"], stats["seconds"]))
    return float(sum(part[0] for part in parts) / max(part[1] for part in parts))


def summary(
    trained: list[dict[str, float]],
    frozen: list[dict[str, float]],
    plain_rate: float,
    lengths: list[float],
) -> list[str]:
    """What drafting and co-training were worth here."""
    lines = []
    for name, steps, length in zip(
        ("co-trained", "frozen"), (trained, frozen), lengths, strict=True
    ):
        tokens = sum(one["rollout/tokens"] for one in steps)
        seconds = sum(one["rollout/tokens"] / one["rollout/tokens_per_second"] for one in steps)
        lines.append(
            f"  draft {name}: {tokens / seconds:.0f} tokens/s in these steps; then, always drafting, "
            f"{length:.2f} tokens a verification on held-out prompts"
        )
    last = trained[-1]
    return [
        *lines,
        f"  without a draft: {plain_rate:.0f} tokens/s; drafting pays above "
        f"{last['rollout/break_even']:.2f} tokens a verification by the costs measured in the last step, "
        f"in which the engine drafted {last['rollout/draft_tokens']:.1f} tokens on average (0 is among its choices)",
        "  seconds of the last step: "
        + ", ".join(
            f"{name.removeprefix('seconds/')} {value:.1f}"
            for name, value in last.items()
            if name.startswith("seconds/")
        ),
    ]


def interval(before: HeldOut, after: HeldOut) -> list[str]:
    """Held-out reward before and after, with what may be concluded from it."""
    lines = [
        f"  {name}: {one.mean:.3f} +- {one.half_width:.3f} (95 %, {len(one.rewards)} prompts x {len(one.rewards[0])})"
        for name, one in (("before", before), ("after ", after))
    ]
    return [
        *lines,
        "  So few steps on so few prompts prove nothing about reward; they show that the loop closes.",
    ]


def _next(work: Workload, step: int) -> Questions:
    size = work.prompts_per_step
    return work.train.take([(step * size + i) % len(work.train) for i in range(size)])


def _line(metrics: dict[str, float]) -> str:
    accepted = "/".join(
        f"{metrics[name]:.2f}" for name in sorted(metrics) if name.startswith("rollout/acceptance/")
    )
    return (
        f"reward {metrics['reward/mean']:.2f}, mixed groups {metrics['reward/mixed_groups']:.0%} | "
        f"policy {metrics['policy_loss']:+.3f} | draft {metrics['draft_loss']:6.2f}, accepted "
        f"{accepted or '-'} | {metrics['rollout/tokens_per_second']:4.0f} tokens/s, "
        f"{metrics['rollout/draft_tokens']:.1f} drafted"
    )


def _of_all(model: sc.ParallelModel, rollouts: list[sc.Rollout]) -> list[sc.Rollout]:
    """Completions of all dp ranks, ordered by prompt."""
    parts = everyone((model.dp_rank, rollouts))
    by_dp = dict(parts)
    return sorted((one for part in by_dp.values() for one in part), key=lambda r: r.prompt_index)


def _readable(work: Workload, one: grpo.Scored) -> tuple[str, str, float]:
    prompt = work.held_out.ids[one.rollout.prompt_index]
    if work.tokenizer is None:
        return str(prompt), str(one.rollout.tokens), one.reward
    text = work.tokenizer.decode(prompt, skip_special_tokens=True).split("user\n")[-1]
    answer = work.tokenizer.decode(one.rollout.tokens, skip_special_tokens=True)
    return text.splitlines()[0], answer, one.reward

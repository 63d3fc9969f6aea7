"""What a GRPO step reports about rewards and rollouts, summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..model import ParallelModel
from .advantages import mixed_groups
from .exchange import Scored, share

SUMMED = ("tokens", "seconds", "verify_steps", "drafted", "accepted", "break_even")


def reward_metrics(
    model: ParallelModel, scored: Sequence[Scored], group_size: int
) -> dict[str, float]:
    """Mean, deviation and extremes of the rewards, lengths, and the share of groups that teach."""
    rewards = torch.tensor([one.reward for one in scored], dtype=torch.float64)
    lengths = [len(one.rollout.tokens) for one in scored]
    mixed = mixed_groups(rewards, group_size)
    own = {
        "count": len(scored),
        "sum": float(rewards.sum()),
        "squares": float(rewards.square().sum()),
        "tokens": sum(lengths),
        "longest": max(lengths, default=0),
        "truncated": sum(one.rollout.finish_reason == "length" for one in scored),
        "groups": len(mixed),
        "mixed": int(mixed.sum()),
    }
    place = model._world.coordinates
    first = place.cp == 0 and place.pp == 0  # the other ranks of a dp index hold the same
    parts = [
        reply
        for reply in share(model, "metrics of rewards", {**own, "first": first})
        if reply["first"]
    ]
    total = {name: sum(part[name] for part in parts) for name in own}
    count, groups = max(total["count"], 1), max(total["groups"], 1)
    mean = total["sum"] / count
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(max(total["squares"] / count - mean**2, 0.0)),
        "reward/mixed_groups": total["mixed"] / groups,
        "completion/mean_length": total["tokens"] / count,
        "completion/max_length": float(max(part["longest"] for part in parts)),
        "completion/truncated": total["truncated"] / count,
    }


def rollout_metrics(model: ParallelModel, stats: Mapping[str, Any]) -> dict[str, float]:
    """Tokens a second of all engines together, and how well the draft did, by position."""
    parts = share(model, "metrics of rollouts", {name: stats[name] for name in SUMMED})
    drafted, accepted = (_add([part[name] for part in parts]) for name in ("drafted", "accepted"))
    steps = sum(part["verify_steps"] for part in parts)
    seconds = max(part["seconds"] for part in parts)
    tokens = sum(part["tokens"] for part in parts)
    return {
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / seconds if seconds else 0.0,
        "rollout/acceptance_length": 1.0 + sum(accepted) / steps if steps else 0.0,
        "rollout/draft_tokens": sum(drafted) / steps if steps else 0.0,
        "rollout/break_even": max(part["break_even"] for part in parts),
        **{
            f"rollout/acceptance/{i}": a / d
            for i, (a, d) in enumerate(zip(accepted, drafted, strict=True))
            if d
        },
    }


def slowest(model: ParallelModel, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, of the rank that took longest."""
    parts = share(model, "seconds", {"seconds": dict(seconds)})
    return {name: max(part["seconds"].get(name, 0.0) for part in parts) for name in seconds}


def _add(columns: Sequence[Sequence[int]]) -> list[int]:
    width = max((len(column) for column in columns), default=0)
    return [sum(c[i] for c in columns if i < len(c)) for i in range(width)]

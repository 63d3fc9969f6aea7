"""What the demo trains on and with: packed batches of sampled answers, and the policy's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import spec_compile as sc

from .data import Sample, SampleSettings, load_model, load_samples

CLIP = 0.2
ENTROPY_BONUS = 0.01
TTT_LENGTH = 3
SAMPLING = SampleSettings(
    train_prompts=8, held_out_prompts=3, samples_per_prompt=8, temperature=0.7
)


@dataclass(frozen=True)
class Episode:
    """One document: a prompt with a completion, and how much better it did than its group."""

    prompt: list[int]
    completion: list[int]
    advantage: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Models and data of a run, the same on every rank."""

    target: Any
    draft: Any
    train: list[list[Episode]]
    """Episodes of each step, taken in turn."""
    held_out: list[Episode]
    temperature: float = 1.0
    """Of sampling, hence of the policy's log-probs."""
    policy_lr: float = 1e-6
    draft_lr: float = 1e-3


def smollm2() -> Workload:
    """SmolLM2-135M, a fresh EAGLE-3 draft, and the target's own answers to small sums."""
    target, tokenizer = load_model()
    train, held_out = load_samples(target, tokenizer, SAMPLING)
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=TTT_LENGTH)
    return Workload(
        target,
        draft,
        steps_of(train),
        [_episode(one) for one in held_out],
        temperature=SAMPLING.temperature,
    )


def steps_of(samples: Sequence[Sample]) -> list[list[Episode]]:
    """Two lists of episodes a prompt, with the whole group's normalised rewards as advantages.

    A group whose rewards are all equal has advantages 0: it teaches the draft alone, and comes last.
    """
    groups: dict[int, list[Sample]] = {}
    for one in samples:
        groups.setdefault(one.group, []).append(one)
    mixed_first = sorted(groups.values(), key=lambda group: not any(_normalise(group)))
    steps = []
    for group in mixed_first:
        scored = sorted(zip(_normalise(group), group, strict=True), key=lambda pair: pair[0])
        episodes = [_episode(one, advantage) for advantage, one in scored]
        steps += [episodes[0::2], episodes[1::2]]  # both with good and bad answers, where there are
    return steps


def pack(episodes: Sequence[Episode]) -> sc.PackedBatch:
    """Lay episodes end to end; the losses count the completions' tokens."""
    lengths = [len(one.prompt) + len(one.completion) for one in episodes]
    ids = [token for one in episodes for token in one.prompt + one.completion]
    mask = [
        place >= len(one.prompt)
        for one, n in zip(episodes, lengths, strict=True)
        for place in range(n)
    ]
    advantages = torch.tensor([one.advantage for one in episodes])
    return sc.PackedBatch(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor([0, *lengths]).cumsum(0),
        torch.tensor(mask, dtype=torch.bool),
        {"advantages": advantages.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))},
    )


def policy_loss(rows: sc.TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient with a small entropy bonus; sums over valid tokens."""
    new, old = rows.logprobs, rows.fields["old_logprobs"]
    ratio = torch.where(rows.mask, torch.exp(new - old), 1.0)
    advantages = rows.fields["advantages"]
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    entropy = torch.where(rows.mask, rows.entropy, 0.0)
    sums = {
        "logprob": torch.where(rows.mask, new, 0.0).sum(),
        "entropy": entropy.sum(),
        "clipped": (ratio != clipped).sum(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
    }
    return -torch.where(rows.mask, gain, 0.0).sum() - ENTROPY_BONUS * entropy.sum(), sums


def _episode(one: Sample, advantage: float = 0.0) -> Episode:
    return Episode(one.prompt_ids, one.completion_ids, advantage)


def _normalise(group: Sequence[Sample]) -> list[float]:
    rewards = torch.tensor([one.reward for one in group])
    centred = rewards - rewards.mean()
    spread = float(centred.square().mean().sqrt())
    return (centred / spread).tolist() if spread > 0 else [0.0] * len(group)

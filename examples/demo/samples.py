"""First completions of every prompt, by the engine without a draft: what the proof and the warm-up use."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

import spec_compile as sc
from spec_compile import grpo

from .show import say
from .task import Questions, Workload

SEED = 0
PROOF_DOCUMENTS = 4


@dataclasses.dataclass(frozen=True)
class Samples:
    """Completions of the training prompts and of the held-out ones, with their rewards."""

    train: list[grpo.Scored]
    held_out: list[grpo.Scored]


def draw(work: Workload) -> Samples:
    """Sample a group for every prompt, in this process."""
    engine = work.engine()
    scorer = grpo.Scorer(work.reward, work.tokenizer)
    parts = []
    for name, questions in (("training", work.train), ("held-out", work.held_out)):
        params = work.sampling(SEED) if questions is work.train else work.measuring(SEED)
        found = engine.generate(questions.ids, params)
        rewards = scorer.score(questions.ids, questions.columns, found)
        scored = [grpo.Scored(*pair) for pair in zip(found, rewards, strict=True)]
        stats = engine.stats
        mean = sum(one.reward for one in scored) / len(scored)
        say(
            f"  {name}: {len(scored)} completions, {stats['tokens']} tokens, "
            f"{stats['tokens'] / stats['seconds']:.0f} tokens/s; mean reward {mean:.2f}"
        )
        parts.append(scored)
    return Samples(*parts)


def save(samples: Samples, file: Path) -> None:
    """Write them for the ranks."""
    file.write_text(json.dumps(dataclasses.asdict(samples)))


def load(file: Path) -> Samples:
    """Read what `save` wrote."""
    parts = {
        name: [grpo.Scored(sc.Rollout(**one["rollout"]), one["reward"]) for one in scored]
        for name, scored in json.loads(file.read_text()).items()
    }
    return Samples(**parts)


def proof_batch(
    work: Workload, samples: Samples, share: tuple[int, int] = (0, 1)
) -> sc.PackedBatch:
    """Good and bad answers to one prompt: a small batch whose policy gradient is not zero.

    ``share`` is (dp rank, dp size): which of the documents.
    """
    n = work.group_size
    groups = [samples.train[i : i + n] for i in range(0, len(samples.train), n)]
    mixed = next((g for g in groups if len({one.reward for one in g}) > 1), groups[0])
    ranked = sorted(mixed, key=lambda one: one.reward)
    half = PROOF_DOCUMENTS // 2
    chosen = [*ranked[:half], *ranked[-half:]]
    advantages = grpo.group_advantages(torch.tensor([one.reward for one in chosen]), len(chosen))
    rank, size = share
    rollouts = [one.rollout for one in chosen]
    return grpo.pack_rollouts(work.train.ids, rollouts[rank::size], advantages[rank::size])


def warm_up_batches(
    work: Workload, samples: Samples, share: tuple[int, int]
) -> list[sc.PackedBatch]:
    """Batches with a completion of every prompt; ``share`` is (dp rank, dp size)."""
    n, (rank, size) = work.group_size, share
    return [pack(work.train, samples.train[i::n][rank::size]) for i in range(n)]


def pack(questions: Questions, scored: list[grpo.Scored]) -> sc.PackedBatch:
    """Lay completions end to end, for the draft alone."""
    rollouts = [one.rollout for one in scored]
    return grpo.pack_rollouts(questions.ids, rollouts, torch.zeros(len(scored)))

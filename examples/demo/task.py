"""What the demo trains on and with: two models, prompts with their answers, and a few numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import spec_compile as sc
from spec_compile import grpo

from .data import Prompt, load_model, make_prompts, reward

TTT_LENGTH = 3
TRAIN_PROMPTS, HELD_OUT_PROMPTS = 12, 6


@dataclass(frozen=True)
class Questions:
    """Prompts, and one entry a prompt of each column that the reward function reads."""

    ids: list[list[int]]
    columns: Mapping[str, Sequence[Any]]

    def take(self, places: Sequence[int]) -> Questions:
        """Choose some of the prompts."""
        columns = {name: [column[i] for i in places] for name, column in self.columns.items()}
        return Questions([self.ids[i] for i in places], columns)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Models and data of a run, the same on every rank."""

    target: Any
    draft: Any
    train: Questions
    held_out: Questions
    reward: grpo.RewardFunction
    tokenizer: Any = None
    group_size: int = 8
    """Completions a prompt."""
    prompts_per_step: int = 2
    max_tokens: int = 32
    temperature: float = 0.7
    """Of sampling, hence of the policy's log-probs."""
    policy_lr: float = 2e-6
    draft_lr: float = 1e-3
    """Of the warm-up; beside the policy the draft learns at a fifth of it."""
    held_out_samples: int = 4

    def sampling(self, seed: int | None = None) -> sc.SamplingParams:
        """How a group is drawn."""
        return sc.SamplingParams(
            n=self.group_size, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
        )

    def measuring(self, seed: int) -> sc.SamplingParams:
        """How held-out prompts are answered: the same random numbers every time."""
        return dataclasses.replace(self.sampling(seed), n=self.held_out_samples)

    def engine(self, draft: Any = None, num_speculative_tokens: int | None = None) -> sc.Engine:
        """Make a rollout engine with its own copies of the models."""
        longest = max(len(ids) for ids in (*self.train.ids, *self.held_out.ids))
        return sc.Engine(
            self.target,
            draft,
            max_num_seqs=32,
            max_model_len=longest + self.max_tokens,
            num_speculative_tokens=num_speculative_tokens,
            tokenizer=self.tokenizer,
        )


def smollm2() -> Workload:
    """SmolLM2-135M, a fresh EAGLE-3 draft, and small sums."""
    target, tokenizer = load_model()
    prompts = make_prompts(tokenizer, TRAIN_PROMPTS + HELD_OUT_PROMPTS, seed=0)
    return Workload(
        target=target,
        draft=sc.drafts.Eagle3.from_target(target, ttt_length=TTT_LENGTH),
        train=_questions(prompts[:TRAIN_PROMPTS]),
        held_out=_questions(prompts[TRAIN_PROMPTS:]),
        reward=reward,
        tokenizer=tokenizer,
    )


def _questions(prompts: Sequence[Prompt]) -> Questions:
    columns = {"task": [one.task for one in prompts], "answer": [one.answer for one in prompts]}
    return Questions([one.ids for one in prompts], columns)

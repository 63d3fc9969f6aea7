"""Rollouts become one packed batch, aligned with their tokens."""

from __future__ import annotations

from typing import Literal

import torch

from spec_compile import Rollout
from spec_compile.runtime.grpo.packing import pack_rollouts

PROMPTS = [[5, 6, 7], [8]]


def rollout(prompt: int, tokens: list[int], reason: Literal["stop", "length"] = "stop") -> Rollout:
    logprobs = [-0.5 * (i + 1) for i in range(len(tokens))]
    return Rollout(prompt, tokens, logprobs, reason, 0)


def test_documents_are_prompt_and_completion_with_everything_at_its_token() -> None:
    rollouts = [rollout(0, [1, 2]), rollout(1, [3]), rollout(1, [4, 2, 2])]
    batch = pack_rollouts(PROMPTS, rollouts, torch.tensor([1.0, -1.0, 0.5]))
    assert batch.tokens.tolist() == [5, 6, 7, 1, 2, 8, 3, 8, 4, 2, 2]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 11]
    assert batch.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False, True, False] + [True] * 3
    assert batch.fields["rollout_logprobs"].tolist() == [
        0,
        0,
        0,
        -0.5,
        -1,
        0,
        -0.5,
        0,
        -0.5,
        -1,
        -1.5,
    ]
    assert batch.fields["advantages"].tolist() == [1.0] * 5 + [-1.0] * 2 + [0.5] * 4


def test_truncated_completions_can_leave_the_policy_loss_but_still_teach_the_draft() -> None:
    rollouts = [rollout(0, [1, 2], "length"), rollout(1, [3])]
    batch = pack_rollouts(PROMPTS, rollouts, torch.zeros(2), mask_truncated=True)
    assert batch.loss_mask.nonzero()[:, 0].tolist() == [6]
    assert batch.draft_mask is not None
    assert batch.draft_mask.nonzero()[:, 0].tolist() == [3, 4, 6]


def test_no_rollouts_make_an_empty_batch() -> None:
    batch = pack_rollouts(PROMPTS, [], torch.zeros(0))
    assert batch.tokens.shape == (0,)
    assert batch.cu_seqlens.tolist() == [0]

"""Scored rollouts laid end to end as one packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.errors import BatchError

from ..rollout.params import Rollout


def pack_rollouts(
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    advantages: Tensor | Sequence[float],
    *,
    mask_truncated: bool = False,
) -> PackedBatch:
    """Lay prompt + completion documents end to end; the losses count the completions' tokens.

    Args:
        prompts: ids of each prompt; ``rollout.prompt_index`` points into them.
        rollouts: completions.
        advantages: [len(rollouts)], a tensor or numbers.
        mask_truncated: completions that a length limit cut leave the policy loss. The draft learns from
            them all the same: the engine will meet such tokens again.

    Returns:
        A batch with the fields ``advantages`` and ``rollout_logprobs``, fp32 [T].

    Raises:
        BatchError: there is not one advantage a rollout.
    """
    advantages = _one_each(advantages, len(rollouts))
    ids: list[int] = []
    policy_mask: list[bool] = []
    draft_mask: list[bool] = []
    logprobs: list[float] = []
    lengths: list[int] = []
    for rollout in rollouts:
        prompt, length = prompts[rollout.prompt_index], len(rollout.tokens)
        counts = not (mask_truncated and rollout.finish_reason == "length")
        ids += [*prompt, *rollout.tokens]
        policy_mask += [False] * len(prompt) + [counts] * length
        draft_mask += [False] * len(prompt) + [True] * length
        logprobs += [0.0] * len(prompt) + rollout.logprobs
        lengths.append(len(prompt) + length)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return PackedBatch(
        tokens=torch.tensor(ids, dtype=torch.int64),
        cu_seqlens=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
        loss_mask=torch.tensor(policy_mask, dtype=torch.bool),
        fields={
            "advantages": advantages.repeat_interleave(sizes),
            "rollout_logprobs": torch.tensor(logprobs, dtype=torch.float32),
        },
        draft_mask=torch.tensor(draft_mask, dtype=torch.bool),
    )


def _one_each(advantages: Tensor | Sequence[float], count: int) -> Tensor:
    """[count], fp32 on the host, where the batch is made."""
    try:
        given = torch.as_tensor(advantages, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(
            f"advantages must be a tensor or a list of {count} numbers, found {type(advantages).__name__}: {error}"
        ) from error
    if given.shape != (count,):
        raise BatchError(
            f"advantages must hold one number a rollout, [{count}], found shape {list(given.shape)}; take those of "
            "group_advantages(rewards, n), in the order of the rollouts"
        )
    return given

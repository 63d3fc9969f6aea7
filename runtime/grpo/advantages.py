"""How much better than its group a completion did."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """Centre rewards by their group's mean and divide by its standard deviation (GRPO).

    Args:
        rewards: [groups * group_size], samples of one prompt next to each other.
        group_size: completions a prompt, at least 2.
        eps: added to the deviation; groups of equal rewards get exactly 0.

    Returns:
        Advantages of the same shape, in fp64.
    """
    groups = rewards.double().unflatten(0, (-1, group_size))
    centred = groups - groups.mean(1, keepdim=True)
    # a group of equal rewards must not turn a rounding error of its mean into a signal
    centred = torch.where(mixed_groups(rewards, group_size)[:, None], centred, 0.0)
    deviation = (centred.square().sum(1, keepdim=True) / (group_size - 1)).sqrt()
    return (centred / (deviation + eps)).reshape(-1)


def mixed_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Tell which groups have different rewards, bool [groups]: only these teach the policy."""
    groups = rewards.double().unflatten(0, (-1, group_size))
    mixed: Tensor = groups.amax(1) > groups.amin(1)
    return mixed

"""Group advantages against their definition."""

from __future__ import annotations

import statistics

import torch

from spec_compile.runtime.grpo.advantages import group_advantages, mixed_groups


def test_advantages_are_normalised_inside_each_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.25, 2.0])
    got = group_advantages(rewards, 3).tolist()
    for start in (0, 3):
        group = rewards[start : start + 3].tolist()
        mean, deviation = statistics.mean(group), statistics.stdev(group)
        want = [(one - mean) / (deviation + 1e-4) for one in group]
        torch.testing.assert_close(got[start : start + 3], want)


def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero() -> None:
    rewards = torch.tensor([0.1] * 7 + [0.1, 0.3] + [0.2] * 5)
    advantages = group_advantages(rewards, 7)
    assert (advantages[:7] == 0).all()
    assert (advantages[7:] != 0).all()
    assert mixed_groups(rewards, 7).tolist() == [False, True]


def test_no_rollouts_have_no_advantages() -> None:
    assert group_advantages(torch.zeros(0), 4).shape == (0,)

"""The DAPO loss against a loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile import ConfigError, TokenOutputs
from spec_compile.runtime.grpo.loss import DapoLoss

MASK = torch.tensor([False, True, True, False, True, True, True, False])


def rows_of(logprobs: Tensor, **fields: Tensor) -> TokenOutputs:
    length = len(logprobs)
    ids = torch.arange(length)
    return TokenOutputs(
        logprobs=logprobs,
        entropy=torch.rand(length, dtype=torch.float64),
        mask=MASK[:length],
        tokens=ids,
        document=torch.zeros_like(ids),
        cu_seqlens=torch.tensor([0, length]),
        fields=fields,
    )


def drawn(length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    new = (-torch.rand(length, dtype=torch.float64) * 3).requires_grad_()
    old = new.detach() + torch.randn(length, dtype=torch.float64) * 0.5
    return new, old, torch.randn(length, dtype=torch.float64)


def test_loss_and_gradient_equal_a_loop_over_tokens() -> None:
    new, old, advantages = drawn()
    loss, sums = DapoLoss(0.2, 0.28)(rows_of(new, advantages=advantages, old_logprobs=old))
    (got,) = torch.autograd.grad(loss, new)
    current = new.tolist()
    want, grad, low, high = 0.0, [0.0] * 8, 0, 0
    for t in MASK.nonzero()[:, 0].tolist():
        ratio, a = math.exp(current[t] - float(old[t])), float(advantages[t])
        clipped = min(max(ratio, 0.8), 1.28)
        if clipped * a < ratio * a:  # the bound is active: no gradient
            want -= clipped * a
            low, high = low + (ratio < 1), high + (ratio > 1)
        else:
            want -= ratio * a
            grad[t] = -ratio * a
    assert low + high > 0
    assert float(loss.detach()) == pytest.approx(want)
    torch.testing.assert_close(got.tolist(), grad)
    assert (int(sums["clip/low"]), int(sums["clip/high"])) == (low, high)


def test_first_step_on_rollouts_has_ratio_one_and_the_gradient_of_reinforce() -> None:
    new, _, advantages = drawn()
    loss, sums = DapoLoss()(rows_of(new, advantages=advantages))
    assert float(sums["ratio/min"]) == float(sums["ratio/max"]) == 1.0
    (got,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(got, torch.where(MASK, -advantages, 0.0))


def test_a_wild_value_outside_the_mask_changes_nothing() -> None:
    new, old, advantages = drawn()
    rows = rows_of(new, advantages=advantages, old_logprobs=torch.where(MASK, old, -1e6))
    loss, _ = DapoLoss()(rows)
    (grad,) = torch.autograd.grad(loss, new)
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_mismatch_with_the_engine_is_measured_over_valid_tokens() -> None:
    new, _, advantages = drawn()
    gap = torch.where(MASK, 0.25, 9.0).double()
    _, sums = DapoLoss()(rows_of(new, advantages=advantages, rollout_logprobs=new.detach() - gap))
    assert float(sums["mismatch"].detach()) == pytest.approx(5 * math.exp(0.25))


def test_no_rows_give_a_loss_of_zero() -> None:
    new, _, advantages = drawn(0)
    loss, sums = DapoLoss()(rows_of(new, advantages=advantages))
    assert float(loss.detach()) == 0.0
    assert float(sums["ratio/max"]) == 1.0


@pytest.mark.parametrize("limits", [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0), (0.2, math.nan)])
def test_clip_limits_out_of_range_are_refused(limits: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="clip_low"):
        DapoLoss(*limits)

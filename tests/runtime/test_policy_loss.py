"""The call of a policy loss: what it is differentiated by."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.contract import TokenOutputs
from spec_compile.runtime.policy_loss import call_policy_loss


def rows() -> TokenOutputs:
    logprobs = torch.tensor([0.0, -1.0, -2.0, -3.0], requires_grad=True)
    return TokenOutputs(
        logprobs=logprobs,
        entropy=torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True),
        mask=torch.tensor([False, True, True, False]),
        tokens=torch.arange(4),
        document=torch.zeros(4, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 4]),
        fields={},
    )


def test_a_loss_that_replaces_its_rows_is_differentiated_by_those_it_was_given() -> None:
    def loss(given: TokenOutputs) -> Tensor:
        given.logprobs = 3 * given.logprobs * given.mask
        given.mask = torch.zeros_like(given.mask)
        return given.logprobs.sum() - given.entropy.square().sum()

    by_logprobs, by_entropy = call_policy_loss(loss, rows()).gradients
    assert by_logprobs is not None
    assert by_entropy is not None
    assert by_logprobs.tolist() == [0.0, 3.0, 3.0, 0.0]
    assert by_entropy.tolist() == [0.0, -2.0, -4.0, -6.0]

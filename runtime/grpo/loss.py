"""The policy loss of DAPO (Yu et al. 2025, arXiv 2503.14476): a token mean of clipped gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_compile.contract import TokenOutputs
from spec_compile.errors import ConfigError
from spec_compile.options import refuse_unknown


@refuse_unknown({"epsilon": "it is clip_low", "epsilon_high": "it is clip_high"})
@dataclass(frozen=True)
class DapoLoss:
    """A sum over valid tokens of ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    ``r = exp(logprob - old_logprob)``. Reads ``rows.fields["advantages"]`` and, where there is one,
    ``"old_logprobs"``; without it the step is the first on its rollouts, and r is exactly 1 in value.
    `step` divides by the global number of valid tokens: the mean is over tokens, not sequences.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low < 1.0 or not self.clip_high > 0.0:
            raise ConfigError(
                f"clip_low lies in (0, 1) and clip_high above 0, found {self.clip_low} and {self.clip_high}"
            )

    def __call__(self, rows: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Give the sum of this micro-batch and the sums of what is measured beside it."""
        new, advantages = rows.logprobs, rows.fields["advantages"].to(rows.logprobs.dtype)
        old = rows.fields.get("old_logprobs", new.detach())
        # masked before exp: a wild value outside the mask must not make a NaN gradient
        ratio = torch.exp(torch.where(rows.mask, new - old, 0.0))
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        with_one = torch.cat([ratio.detach(), ratio.new_ones(1)])  # a micro-batch may have no rows
        bound = clipped * advantages < ratio * advantages
        sums = {
            "entropy": _masked_sum(rows.entropy, rows),
            "clip/low": _masked_sum(bound & (ratio < 1), rows),
            "clip/high": _masked_sum(bound & (ratio > 1), rows),
            "ratio/min": with_one.amin(),
            "ratio/max": with_one.amax(),
        }
        if "rollout_logprobs" in rows.fields:
            gap = old - rows.fields["rollout_logprobs"]
            sums["mismatch"] = _masked_sum(torch.exp(gap.abs()), rows)
        return -_masked_sum(gain, rows), sums


def _masked_sum(values: Tensor, rows: TokenOutputs) -> Tensor:
    return torch.where(rows.mask, values, 0).sum()

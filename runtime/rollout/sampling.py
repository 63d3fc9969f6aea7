"""From logits to the law that is sampled, and from a law to a token.

Legend: R rows (one law each), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

from .params import SamplingParams


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of each row."""

    greedy: Tensor
    """bool [R]."""
    temperature: Tensor
    """fp64 [R]; 1 in greedy rows."""
    top_k: Tensor
    """int64 [R]; 0 keeps all."""
    top_p: Tensor
    """fp64 [R]."""
    all_greedy: bool
    any_greedy: bool
    truncates: bool
    """Some row has a top-k or top-p."""
    scales: bool
    """Some row has a temperature other than 1."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowParams:
        """Collect one row for each; greedy rows keep the whole softmax(logits)."""
        greedy = [p.temperature == 0 for p in params]
        return cls(
            torch.tensor(greedy, dtype=torch.bool, device=device),
            torch.tensor(
                [p.temperature or 1.0 for p in params], dtype=torch.float64, device=device
            ),
            torch.tensor([p.top_k if p.temperature else 0 for p in params], device=device),
            torch.tensor(
                [p.top_p if p.temperature else 1.0 for p in params],
                dtype=torch.float64,
                device=device,
            ),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            truncates=any(p.temperature and (p.top_k or p.top_p < 1) for p in params),
            scales=any(p.temperature not in (0, 1) for p in params),
        )

    def repeated(self, times: int) -> RowParams:
        """Give each row ``times`` times, next to each other."""
        if times == 1:
            return self
        vectors = (self.greedy, self.temperature, self.top_k, self.top_p)
        greedy, temperature, top_k, top_p = (x.repeat_interleave(times) for x in vectors)
        return RowParams(
            greedy, temperature, top_k, top_p,
            self.all_greedy, self.any_greedy, self.truncates, self.scales,
        )  # fmt: skip


def log_law(logits: Tensor, params: RowParams) -> Tensor:
    """Log-probabilities of each row's sampling law: temperature, then top-k, then top-p.

    Args:
        logits: [R, V].
        params: of the same R rows.

    Returns:
        fp32 [R, V] (fp64 for fp64); -inf for tokens that were cut. A row whose logits hold a NaN or
        +inf, or only -inf, comes back as NaN throughout.
    """
    wide = logits.to(accumulator(logits.dtype))
    if params.scales:
        wide = wide / params.temperature.to(wide.dtype)[:, None]
    total = wide.logsumexp(-1, keepdim=True)
    law = wide - torch.where(total.isfinite(), total, torch.nan)
    if params.truncates:
        rows = ((params.top_k > 0) | (params.top_p < 1)).nonzero()[:, 0]
        law[rows] = _truncate(law[rows], params.top_k[rows], params.top_p[rows])
    return law


def _truncate(law: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Cut each row of log-probs [R, V] and normalise what is left."""
    ranked, order = law.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(law.shape[-1], device=law.device)
    kept = torch.where(top_k > 0, top_k, law.shape[-1])[:, None] > rank
    mass = torch.where(kept, ranked.double().exp(), 0.0)
    before = mass.cumsum(-1) - mass
    kept &= (before < top_p[:, None] * mass.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    keep = torch.zeros_like(kept).scatter_(-1, order, kept)
    cut = law.masked_fill(~keep, float("-inf"))
    return cut - cut.logsumexp(-1, keepdim=True)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative sum.

    Args:
        weights: [R, V], not negative, not all 0; need not be normalised.
        uniform: fp64 [R] in [0, 1).

    Returns:
        int64 [R]; never a token of weight 0.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    goal = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, goal, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)

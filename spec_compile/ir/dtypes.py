"""In which dtype sums run."""

from __future__ import annotations

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps, sums and losses over values of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

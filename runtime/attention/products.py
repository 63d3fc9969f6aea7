"""Attention as plain matrix products: the backend that every other one is probed against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

from .interface import Cut

SCORES_PER_CHUNK = 1 << 22
"""How many scores are held at once."""


class Math:
    """Plain matrix products in fp32 (fp64 for fp64), chunked over rows; any device, any head dims."""

    name = "math"
    device_type: str | None = None
    cut = Cut.MASKED
    most_keys: int | None = None

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        return None if dtype.is_floating_point else f"it does not take {dtype}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        work = accumulator(q.dtype)
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        lse = q.new_empty((q.shape[0], q.shape[1]), dtype=work)
        keys, values = k.to(work).permute(1, 2, 0), v.to(work).transpose(0, 1)
        for rows in _row_chunks(q.shape, k.shape[0]):
            scores = _grouped(q[rows], k.shape[1], work) @ keys * scale
            _mask_(scores, rows, mask, causal)
            part = scores.logsumexp(-1)
            weights = (scores - _finite(part)[..., None]).exp_()
            out[rows] = _ungrouped(weights @ values, out[rows].shape).to(q.dtype)
            lse[rows] = _ungrouped(part[..., None], (*lse[rows].shape, 1))[..., 0]
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv), dk and dv in fp32 (fp64 for fp64)."""
        work, heads = accumulator(q.dtype), k.shape[1]
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        keys, values = k.to(work).transpose(0, 1), v.to(work).transpose(0, 1)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _row_chunks(q.shape, k.shape[0]):
            q_rows = _grouped(q[rows], heads, work)
            grad = _grouped(grad_out[rows], heads, work)
            delta = (grad * _grouped(out[rows], heads, work)).sum(-1, keepdim=True)
            scores = q_rows @ keys.transpose(1, 2) * scale
            _mask_(scores, rows, mask, causal)
            weights = (scores - _grouped(lse[rows][..., None], heads, work)).exp_()
            dv += weights.transpose(1, 2) @ grad
            d_scores = weights * (grad @ values.transpose(1, 2) - delta) * scale
            dq[rows] = _ungrouped(d_scores @ keys, dq[rows].shape).to(q.dtype)
            dk += d_scores.transpose(1, 2) @ q_rows
        return dq, dk.transpose(0, 1), dv.transpose(0, 1)


def _row_chunks(shape: torch.Size, num_keys: int) -> list[slice]:
    step = max(1, SCORES_PER_CHUNK // max(1, shape[1] * num_keys))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[m, heads * g, d] -> [heads, m * g, d]: all queries of one key head together."""
    m, num_heads, d = x.shape
    group = num_heads // heads
    return x.to(dtype).view(m, heads, group, d).transpose(0, 1).reshape(heads, m * group, d)


def _ungrouped(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """[heads, m * g, d] -> [m, heads * g, d]."""
    heads, group = x.shape[0], shape[1] // x.shape[0]
    return x.view(heads, shape[0], group, shape[2]).transpose(0, 1).reshape(shape)


def _mask_(scores: Tensor, rows: slice, mask: Tensor | None, causal: bool) -> None:
    grouped = scores.view(scores.shape[0], rows.stop - rows.start, -1, scores.shape[-1])
    if mask is not None:
        grouped += mask[rows, None]
    if causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        key = torch.arange(scores.shape[-1], device=scores.device)
        grouped.masked_fill_((key > row[:, None])[:, None], -math.inf)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)

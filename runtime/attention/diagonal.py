"""Diagonal branches: branch key j belongs to query row j alone, so a row's part is one score."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

from .tiles import Merged, Partial


def diagonal_partial(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """A diagonal branch as a partial: its output is the value itself, its lse the score.

    Args:
        q: [R, Hq, D].
        k: [R, Hkv, D].
        v: [R, Hkv, Dv].
        scale: factor on the scores.
    """
    rows, heads, _ = k.shape
    work = accumulator(q.dtype)
    scores = (_by_key_head(q, heads).to(work) * k[:, :, None].to(work)).sum(-1) * scale
    out = v[:, :, None].expand(rows, heads, q.shape[1] // heads, v.shape[2])
    return Partial(out.reshape(rows, q.shape[1], v.shape[2]), scores.view(rows, q.shape[1]))


def diagonal_backward_(
    merged: Merged, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Add to ``dq`` and return (dk, dv) of one diagonal branch, in closed form.

    With p = exp(score - lse): dv = p * grad, d_score = p * (grad . v - delta). Source: the two-part
    attention of EAGLE-3's training-time test.

    Args:
        merged: grad_out, out and lse of the whole softmax.
        delta: [R, Hq], row sums of grad_out * out.
        q: [R, Hq, D].
        k: [R, Hkv, D].
        v: [R, Hkv, Dv].
        scale: factor on the scores.
        dq: [R, Hq, D], fp32 or fp64.
    """
    heads, work = k.shape[1], accumulator(q.dtype)
    q_heads, grad = _by_key_head(q, heads).to(work), _by_key_head(merged.grad_out, heads).to(work)
    keys, values = k[:, :, None].to(work), v[:, :, None].to(work)
    scores = (q_heads * keys).sum(-1) * scale
    weights = torch.exp(scores - merged.lse.view(scores.shape))
    d_scores = weights * ((grad * values).sum(-1) - delta.view(scores.shape)) * scale
    _by_key_head(dq, heads).addcmul_(d_scores[..., None], keys)
    dk = (d_scores[..., None] * q_heads).sum(2)
    dv = (weights[..., None] * grad).sum(2)
    return dk.to(k.dtype), dv.to(v.dtype)


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, x.shape[1] // heads, x.shape[2])

"""Attention kernels behind one declared interface, and the choice among them.

The contract of every backend: tensors are [rows, heads, dim]; lse is [rows, heads], natural log, in
fp32 (fp64 for fp64), -inf for a row that sees no key, whose output is 0. The backward takes the
*merged* out and lse of the whole softmax, of which these keys may be a part; there +inf marks a row
that sees nothing anywhere. Query heads are a multiple of key heads and are never expanded.
"""

from __future__ import annotations

import logging
import math
from typing import Protocol

import torch
from torch import Tensor

from spec_compile.errors import ConfigError

log = logging.getLogger(__name__)

SCORES_PER_CHUNK = 1 << 22
"""How many scores the math backend holds at once."""

_fallbacks: dict[str, None] = {}


class Backend(Protocol):
    """Forward and backward of one block of attention; see the module's contract."""

    name: str

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse); ``mask`` [rows, keys] is added to the scores and has q's dtype."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of these keys, given the merged ``out`` and ``lse``."""


class AtenCpu:
    """ATen's CPU flash attention; needs equal head dims of keys and values."""

    name = "aten_cpu"

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        if device.type != "cpu":
            return f"it runs on cpu, the tensors are on {device.type}"
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"it does not take {dtype}"
        if head_dim != value_dim:
            return f"it needs equal head dims, found {head_dim} for keys and {value_dim} for values"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(q), _batched(k), _batched(v), 0.0, causal, attn_mask=mask, scale=scale
        )
        out, lse = _unbatched(out), _unbatched(lse)
        if mask is not None:
            # the kernel reports lse 0 for a row without keys, which a merge would take for a score
            dead = mask.amax(-1) == -math.inf
            lse = lse.masked_fill(dead[:, None], -math.inf)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batched(grad_out), _batched(q), _batched(k), _batched(v), _batched(out),
            _batched(lse), 0.0, causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (_unbatched(grad) for grad in grads)
        return dq, dk, dv


class Math:
    """Plain matrix products in fp32 (fp64 for fp64), chunked over rows; any device, any head dims."""

    name = "math"

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


BACKENDS: dict[str, Backend] = {"aten_cpu": AtenCpu(), "math": Math()}


def backend_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, requested: str = "auto"
) -> str:
    """Name the backend that serves these tensors.

    Args:
        device: where the tensors live.
        dtype: of q, k and v.
        head_dim: of queries and keys.
        value_dim: head dim of the values.
        requested: "auto", or the name of the backend that must serve.

    Raises:
        ConfigError: the requested backend is unknown or cannot serve.
    """
    device = torch.device(device)
    if requested != "auto":
        if requested not in BACKENDS:
            raise ConfigError(
                f"attention must be 'auto' or one of {', '.join(BACKENDS)}, found {requested!r}"
            )
        reason = BACKENDS[requested].limit(device, dtype, head_dim, value_dim)
        if reason is not None:
            raise ConfigError(
                f"attention backend {requested!r} cannot serve: {reason}; use attention='auto'"
            )
        return requested
    for name, backend in BACKENDS.items():
        reason = backend.limit(device, dtype, head_dim, value_dim)
        if reason is None:
            return name
        record_fallback(f"attention backend {name!r} is not used: {reason}")
    raise ConfigError(f"no attention backend takes {dtype} on {device.type}; use a floating dtype")


def record_fallback(text: str) -> None:
    """Log a fallback once, and keep it for `fallbacks`."""
    if text not in _fallbacks:
        _fallbacks[text] = None
        log.warning("%s", text)


def fallbacks() -> tuple[str, ...]:
    """Every fallback taken in this process, oldest first."""
    return tuple(_fallbacks)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _unbatched(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


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

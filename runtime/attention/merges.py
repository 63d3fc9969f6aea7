"""Joins partial attentions by their log-sum-exps: generated Triton kernels, or plain tensor code."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.codegen.diagonal import DiagonalShape, launch_diagonal_backward
from spec_compile.codegen.merge import MergeShape, launch_merge
from spec_compile.codegen.triton_mode import triton_mode
from spec_compile.errors import ConfigError
from spec_compile.ir.dtypes import accumulator

from .diagonal import diagonal_backward_, diagonal_partial
from .interface import record_fallback
from .tiles import Merged, Partial

Diagonal = tuple[Tensor, Tensor]


def merge_backend(device: torch.device, requested: str = "auto") -> str:
    """Name what merges tensors on ``device``: "triton", "triton-interpreted" or "aten".

    Args:
        device: where the tensors live.
        requested: "auto", or "triton" / "aten" to force one.

    Raises:
        ConfigError: unknown name, or Triton was asked for and cannot run there.
    """
    if requested not in ("auto", "aten", "triton"):
        raise ConfigError(f"merge must be 'auto', 'aten' or 'triton', found {requested!r}")
    if requested == "aten":
        return "aten"
    mode = triton_mode(torch.device(device).type)
    if mode is not None:
        return mode
    if requested == "triton":
        raise ConfigError(
            f"merge='triton' cannot run on {device}: Triton compiles for GPUs; on CPU set "
            "TRITON_INTERPRET=1 before triton is imported, or use merge='auto'"
        )
    record_fallback(f"merges on {torch.device(device).type} run as plain tensor code, not Triton")
    return "aten"


def merge(
    partials: Sequence[Partial],
    *,
    q: Tensor,
    scale: float,
    out_dtype: torch.dtype,
    backend: str,
    diagonals: Sequence[Diagonal] = (),
    sinks: Tensor | None = None,
) -> Partial:
    """Merge partials, diagonal branches and sinks into one normalised result.

    Args:
        partials: (out [R, Hq, Dv], lse [R, Hq]); at least one partial or diagonal.
        q: [R, Hq, D]; scores the diagonals.
        scale: factor on the scores.
        out_dtype: of the result; lse is in fp32, or fp64 for fp64.
        backend: a result of `merge_backend`.
        diagonals: (k [R, Hkv, D], v [R, Hkv, Dv]); key j belongs to row j.
        sinks: [Hq], one more logit a head that enters the denominator only.

    Returns:
        out, contiguous, and lse; 0 and -inf in a row without any key or sink. An lse of +inf counts
        as -inf, because some kernels mark rows without keys so.
    """
    if len(partials) == 1 and not diagonals and sinks is None:
        out, lse, all_seen = partials[0]
        if not all_seen:
            out = out.masked_fill(_no_key(lse)[..., None], 0.0)
        return Partial(out.to(out_dtype).contiguous(), lse.contiguous(), all_seen=True)
    if backend == "aten":
        parts = [*partials, *(diagonal_partial(q, k, v, scale) for k, v in diagonals)]
        return _merge_plain(parts, sinks, out_dtype)
    out, lse = launch_merge(
        _merge_shape(partials, q, diagonals, sinks, out_dtype, scale),
        [(part.out, part.lse) for part in partials], q, diagonals, sinks,
    )  # fmt: skip
    return Partial(out, lse, all_seen=True)


def diagonals_backward_(
    merged: Merged, q: Tensor, diagonals: Sequence[Diagonal], scale: float, dq: Tensor, backend: str
) -> list[Diagonal]:
    """Add to ``dq`` [R, Hq, D] and return (dk, dv) of every diagonal branch."""
    if not diagonals:
        return []
    if backend == "aten":
        return [diagonal_backward_(merged, merged.delta, q, k, v, scale, dq) for k, v in diagonals]
    k, v = diagonals[0]
    shape = DiagonalShape(
        num_heads=q.shape[1], num_key_heads=k.shape[1], head_dim=k.shape[2], value_dim=v.shape[2],
        dtype=_name(q.dtype), scale=scale,
    )  # fmt: skip
    return [
        launch_diagonal_backward(shape, merged.grad_out, q, k, v, merged.lse, merged.delta, dq)
        for k, v in diagonals
    ]


def _merge_plain(
    partials: Sequence[Partial], sinks: Tensor | None, out_dtype: torch.dtype
) -> Partial:
    work = accumulator(out_dtype)
    scores = [part.lse.masked_fill(part.lse == math.inf, -math.inf) for part in partials]
    if sinks is not None:
        scores.append(sinks.to(work).expand_as(scores[0]))
    top = functools.reduce(torch.maximum, scores)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = [torch.exp(score - top) for score in scores]
    total = functools.reduce(torch.add, weights)
    out = torch.zeros_like(partials[0].out, dtype=work, memory_format=torch.contiguous_format)
    inverse = torch.where(total > 0, total.reciprocal(), 0.0)
    for part, weight in zip(partials, weights, strict=False):
        share = (weight * inverse)[..., None]
        # a part that a row does not see may hold anything there, NaN included
        out += torch.where(share > 0, part.out.to(work) * share, 0.0)
    return Partial(out.to(out_dtype), top + total.log(), all_seen=True)


def _no_key(lse: Tensor) -> Tensor:
    return lse.abs() == math.inf


def _merge_shape(
    partials: Sequence[Partial], q: Tensor, diagonals: Sequence[Diagonal], sinks: Tensor | None,
    out_dtype: torch.dtype, scale: float,
) -> MergeShape:  # fmt: skip
    return MergeShape(
        partial_dtypes=tuple(_name(part.out.dtype) for part in partials),
        num_heads=q.shape[1],
        num_key_heads=diagonals[0][0].shape[1] if diagonals else q.shape[1],
        head_dim=q.shape[2] if diagonals else 0,
        value_dim=partials[0].out.shape[2] if partials else diagonals[0][1].shape[2],
        num_diagonals=len(diagonals),
        diagonal_dtype=_name(q.dtype) if diagonals else "",
        sinks_dtype="" if sinks is None else _name(sinks.dtype),
        out_dtype=_name(out_dtype),
        scale=scale if diagonals else 1.0,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

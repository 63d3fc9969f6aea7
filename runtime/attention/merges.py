"""Joins partial attentions by their log-sum-exps: generated Triton kernels, or plain tensor code."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.codegen.block_branch import BlockShape, launch_block_backward, launch_merge_block
from spec_compile.codegen.diagonal import DiagonalShape, launch_diagonal_backward
from spec_compile.codegen.kernel import dtype_name
from spec_compile.codegen.merge import MergeShape, launch_merge
from spec_compile.codegen.triton_mode import triton_mode
from spec_compile.errors import ConfigError
from spec_compile.ir.dtypes import accumulator

from .block_branch import BlockBranch, block_backward, block_partial
from .interface import record_fallback
from .tiles import Merged, Partial

BranchGrads = tuple[Tensor, Tensor]
"""(dk, dv)."""


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
    branches: Sequence[BlockBranch] = (),
    sinks: Tensor | None = None,
) -> Partial:
    """Merge partials, branches in blocks and sinks into one normalised result.

    A generated kernel scores all diagonal branches itself, or one branch in larger blocks.

    Args:
        partials: (out [R, Hq, Dv], lse [R, Hq]); at least one partial or branch.
        q: [R, Hq, D]; scores the branches.
        scale: factor on the scores.
        out_dtype: of the result; lse is in fp32, or fp64 for fp64.
        backend: a result of `merge_backend`.
        branches: each with its keys and values.
        sinks: [Hq], one more logit a head that enters the denominator only.

    Returns:
        out, contiguous, and lse; 0 and -inf in a row without any key or sink. An lse of +inf counts
        as -inf, because some kernels mark rows without keys so.
    """
    if len(partials) == 1 and not branches and sinks is None:
        out, lse, all_seen = partials[0]
        if not all_seen:
            out = out.masked_fill(_no_key(lse)[..., None], 0.0)
        return Partial(out.to(out_dtype).contiguous(), lse.contiguous(), all_seen=True)
    fused, others = ([], list(branches)) if backend == "aten" else _fused(branches)
    parts = [*partials, *(block_partial(q, branch, scale) for branch in others)]
    if backend == "aten":
        return _merge_plain(parts, sinks, out_dtype)
    pairs = [(part.out, part.lse) for part in parts]
    if fused and not fused[0].is_diagonal:
        shape = _block_shape(q, fused[0], scale)
        shape = dataclasses.replace(
            shape, partial_dtypes=tuple(dtype_name(out.dtype) for out, _ in pairs),
            sinks_dtype="" if sinks is None else dtype_name(sinks.dtype), out_dtype=dtype_name(out_dtype),
        )  # fmt: skip
        out, lse = launch_merge_block(shape, q, fused[0].k, fused[0].v, pairs, sinks)
    else:
        merge_shape = _merge_shape(parts, q, fused, sinks, out_dtype, scale)
        out, lse = launch_merge(merge_shape, pairs, q, [(b.k, b.v) for b in fused], sinks)
    return Partial(out, lse, all_seen=True)


def branches_backward(
    merged: Merged, q: Tensor, branches: Sequence[BlockBranch], scale: float, backend: str
) -> tuple[list[Tensor], list[BranchGrads]]:
    """Return dq [R, Hq, D] in parts to be added up, and (dk, dv) of every branch in blocks."""
    if backend == "aten":
        plain = [block_backward(merged, q, branch, scale) for branch in branches]
        return [dq for dq, _, _ in plain], [(dk, dv) for _, dk, dv in plain]
    parts: list[Tensor] = []
    grads: dict[int, BranchGrads] = {}
    diagonals = [i for i, branch in enumerate(branches) if branch.is_diagonal]
    if diagonals:
        pairs = [(branches[i].k, branches[i].v) for i in diagonals]
        cotangent = (merged.grad_out, q, merged.lse, merged.delta)
        dq, found = launch_diagonal_backward(_diagonal_shape(q, pairs, scale), *cotangent, pairs)
        parts.append(dq)
        grads |= dict(zip(diagonals, found, strict=True))
    for i, branch in enumerate(branches):
        if not branch.is_diagonal:
            dq, dk, dv = launch_block_backward(
                _block_shape(q, branch, scale), merged.grad_out, q, branch.k, branch.v, merged.lse,
                merged.delta,
            )  # fmt: skip
            parts.append(dq)
            grads[i] = (dk, dv)
    return parts, [grads[i] for i in range(len(branches))]


def _fused(branches: Sequence[BlockBranch]) -> tuple[list[BlockBranch], list[BlockBranch]]:
    """Those that one kernel takes, all diagonal or one, and the others."""
    diagonals = [branch for branch in branches if branch.is_diagonal]
    blocks = [branch for branch in branches if not branch.is_diagonal]
    return (diagonals, blocks) if diagonals else (blocks[:1], blocks[1:])


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
    partials: Sequence[Partial], q: Tensor, diagonals: Sequence[BlockBranch], sinks: Tensor | None,
    out_dtype: torch.dtype, scale: float,
) -> MergeShape:  # fmt: skip
    return MergeShape(
        partial_dtypes=tuple(dtype_name(part.out.dtype) for part in partials),
        num_heads=q.shape[1],
        num_key_heads=diagonals[0].k.shape[1] if diagonals else q.shape[1],
        head_dim=q.shape[2] if diagonals else 0,
        value_dim=partials[0].out.shape[2] if partials else diagonals[0].v.shape[2],
        num_diagonals=len(diagonals),
        diagonal_dtype=dtype_name(q.dtype) if diagonals else "",
        sinks_dtype="" if sinks is None else dtype_name(sinks.dtype),
        out_dtype=dtype_name(out_dtype),
        scale=scale if diagonals else 1.0,
    )


def _block_shape(q: Tensor, branch: BlockBranch, scale: float) -> BlockShape:
    return BlockShape(
        num_heads=q.shape[1], num_key_heads=branch.k.shape[1], head_dim=q.shape[2],
        value_dim=branch.v.shape[2], dtype=dtype_name(q.dtype), scale=scale, rows=branch.rows,
        keys=branch.keys,
    )  # fmt: skip


def _diagonal_shape(q: Tensor, pairs: Sequence[BranchGrads], scale: float) -> DiagonalShape:
    k, v = pairs[0]
    return DiagonalShape(
        num_heads=q.shape[1], num_key_heads=k.shape[1], head_dim=q.shape[2], value_dim=v.shape[2],
        dtype=dtype_name(q.dtype), scale=scale, num_branches=len(pairs),
    )  # fmt: skip

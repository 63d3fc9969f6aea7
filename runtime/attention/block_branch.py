"""Branches in blocks: run i of the rows sees run i of the branch's keys, and nothing else.

A diagonal branch has one row and one key a block; a block draft has as many as slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

from .runs import Array
from .tiles import Merged, Partial

MOST_PER_BLOCK = 64
"""Most rows or keys of one block that a fused kernel takes."""


class BlockBranch(NamedTuple):
    """Keys and values of a branch whose rows and keys are both cut into equally many equal blocks."""

    k: Tensor
    """[S, Hkv, D]."""
    v: Tensor
    """[S, Hkv, Dv]."""
    rows: int = 1
    """Query rows of one block."""
    keys: int = 1
    """Keys of one block."""

    @property
    def is_diagonal(self) -> bool:
        """Whether row i sees key i alone."""
        return self.rows == self.keys == 1


def find_blocks(q_group: Array, k_group: Array) -> tuple[int, int] | None:
    """Rows and keys of one block where the groups prove equal blocks in one order, else None.

    Args:
        q_group: [R].
        k_group: [S]; key j is visible to row r iff ``k_group[j] == q_group[r]``.
    """
    num_blocks = 1 + int(np.count_nonzero(np.diff(k_group)))
    sizes = (len(q_group), len(k_group))
    if 0 in sizes or any(size % num_blocks for size in sizes):
        return None
    rows, keys = (size // num_blocks for size in sizes)
    names = k_group[::keys]
    alike = np.array_equal(np.repeat(names, keys), k_group)
    alike = alike and np.array_equal(np.repeat(names, rows), q_group)
    if max(rows, keys) > MOST_PER_BLOCK or not alike or len(np.unique(names)) < num_blocks:
        return None
    return rows, keys


def block_partial(q: Tensor, branch: BlockBranch, scale: float) -> Partial:
    """Attention to a branch in blocks as a partial, in plain tensor code; q is [R, Hq, D]."""
    heads, value_dim = branch.k.shape[1], branch.v.shape[2]
    queries, keys, values = _blocks(q, branch.rows, heads), *_key_blocks(branch)
    scores = torch.einsum("brhgd,bkhd->brhgk", queries, keys) * scale
    lse = scores.logsumexp(-1)
    out = torch.einsum("brhgk,bkhd->brhgd", (scores - lse[..., None]).exp(), values)
    shape = q.shape[:2]
    return Partial(out.to(q.dtype).reshape(*shape, value_dim), lse.reshape(shape), all_seen=True)


def block_backward(
    merged: Merged, q: Tensor, branch: BlockBranch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a branch in blocks, in closed form and plain tensor code.

    With p = exp(score - lse): dv = p * grad, d_score = p * (grad . v - delta). Source: the two-part
    attention of EAGLE-3's training-time test.
    """
    heads, rows = branch.k.shape[1], branch.rows
    queries, grad = _blocks(q, rows, heads), _blocks(merged.grad_out, rows, heads)
    keys, values = _key_blocks(branch)
    lse, delta = (_blocks(x[..., None], rows, heads) for x in (merged.lse, merged.delta))
    weights = torch.exp(torch.einsum("brhgd,bkhd->brhgk", queries, keys) * scale - lse)
    d_scores = weights * (torch.einsum("brhgd,bkhd->brhgk", grad, values) - delta) * scale
    dq = torch.einsum("brhgk,bkhd->brhgd", d_scores, keys).reshape(q.shape)
    dk = torch.einsum("brhgk,brhgd->bkhd", d_scores, queries).reshape(branch.k.shape)
    dv = torch.einsum("brhgk,brhgd->bkhd", weights, grad).reshape(branch.v.shape)
    return dq, dk.to(branch.k.dtype), dv.to(branch.v.dtype)


def _blocks(x: Tensor, rows: int, heads: int) -> Tensor:
    """[R, Hq, d] -> [blocks, rows, Hkv, group, d] in the accumulator's dtype."""
    x = x.to(accumulator(x.dtype))
    return x.reshape(x.shape[0] // rows, rows, heads, x.shape[1] // heads, x.shape[2])


def _key_blocks(branch: BlockBranch) -> tuple[Tensor, Tensor]:
    """[S, Hkv, d] -> [blocks, keys, Hkv, d] of keys and values."""
    keys, values = (
        x.to(accumulator(x.dtype)).reshape(-1, branch.keys, *x.shape[1:]) for x in branch[:2]
    )
    return keys, values

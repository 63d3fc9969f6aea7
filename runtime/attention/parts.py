"""Gradients that come in parts: each kernel's share of the rows, added up once and put in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec_compile.codegen.sum_parts import SumShape, launch_sum
from spec_compile.codegen.triton_mode import triton_mode
from spec_compile.ir.dtypes import accumulator

PARTS_AT_ONCE = 8
"""How many parts one launch adds up."""


class Part(NamedTuple):
    """A gradient over neighbouring rows; other rows get nothing from it."""

    first: int
    grad: Tensor
    """[m, H, D]."""


def add_up(
    parts: Sequence[Part], like: Tensor, *, places: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """Return the sum of the parts, summed in fp32 (fp64 for fp64) and rounded once.

    Args:
        parts: any number.
        like: [n, H, D]: shape, dtype and device of the result.
        places: int32 [n]: which row of the parts each row of the result is; below 0 for none. None: its own.
        onto: like ``like``, contiguous, of any dtype; added to in place and returned.
    """
    if onto is None and not parts:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    if onto is None and places is None and len(parts) == 1 and len(parts[0].grad) == len(like):
        return parts[0].grad.to(like.dtype).contiguous()
    if triton_mode(like.device.type) == "triton":
        return _by_kernel(parts, like, places, onto)
    return add_up_plain(parts, like, places=places, onto=onto)


def add_up_plain(
    parts: Sequence[Part], like: Tensor, *, places: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """`add_up` as plain tensor code."""
    work = accumulator(like.dtype) if onto is None else onto.dtype
    num_rows = len(like)
    if places is not None:
        num_rows = max((part.first + len(part.grad) for part in parts), default=0)
    total = onto if onto is not None and places is None else None
    if total is None:
        total = torch.zeros((num_rows, *like.shape[1:]), dtype=work, device=like.device)
    for first, grad in parts:
        total[first : first + len(grad)] += grad
    if places is None:
        return total if onto is not None else total.to(like.dtype)
    rows = (places >= 0).nonzero()[:, 0]
    result = torch.zeros_like(like, memory_format=torch.contiguous_format) if onto is None else onto
    # every row comes once: no atomics, two runs give the same bits
    found = total.index_select(0, places[rows]).to(result.dtype)
    result.index_copy_(0, rows, found if onto is None else onto.index_select(0, rows) + found)
    return result


def _by_kernel(
    parts: Sequence[Part], like: Tensor, places: Tensor | None, onto: Tensor | None
) -> Tensor:
    chunks = [parts[i : i + PARTS_AT_ONCE] for i in range(0, max(1, len(parts)), PARTS_AT_ONCE)]
    total = onto
    if total is None:
        dtype = like.dtype if len(chunks) == 1 else accumulator(like.dtype)
        total = like.new_empty(like.shape, dtype=dtype)
    for i, chunk in enumerate(chunks):
        shape = SumShape(
            part_dtypes=tuple(_name(part.grad.dtype) for part in chunk), out_dtype=_name(total.dtype),
            num_heads=like.shape[1], dim=like.shape[2], accumulate=onto is not None or i > 0,
            has_places=places is not None,
        )  # fmt: skip
        launch_sum(shape, total, chunk, places)
    return total if onto is not None else total.to(like.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

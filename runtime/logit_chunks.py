"""Logits in chunks: which rows and words belong together, and what is done to one chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

from .attention.host import Held

CHUNK_ELEMENTS = 1 << 22
"""Logits of one chunk, which then stays near the cache through its elementwise steps."""
GPU_FACTOR = 8
"""How many times as many on a GPU, whose kernels must outlast their launches: 64 MiB in bfloat16."""
CHUNK_TOKENS = 1024
"""Most rows of one chunk where the vocabulary is cut too."""
GPU_CHUNK_TOKENS = 4096
"""The same on a GPU, where chunks with about as many rows as words touch the sums of both gradients least."""
GPU_TILE = 128
"""A GPU's matrix products take rows and words in tiles of so many; an odd row length halves their rate."""
HELD_MASKS = 16
"""Masks whose rows are kept from a forward for its backward: one for each pass of a draft."""


def token_chunks(num_tokens: int, device: torch.device) -> list[slice]:
    """Rows that go together where `vocabulary_chunks` cuts the vocabulary."""
    return _slices(num_tokens, _most_tokens(device))


def vocabulary_chunks(num_tokens: int, num_words: int, device: torch.device) -> list[slice]:
    """Words that go together with one of the `token_chunks` of ``num_tokens`` rows."""
    rows = min(num_tokens, _most_tokens(device))
    return _slices(num_words, max(1, _in_tiles(_elements(device) // max(1, rows), device)))


def full_law_chunks(num_tokens: int, num_words: int, device: torch.device) -> list[slice]:
    """Rows that go together where two laws are compared, which need the whole vocabulary at once."""
    rows = 2 * _elements(device) // max(1, num_words)
    if device.type != "cpu":
        rows *= 2  # the logits of both laws stay in the dtype of the products
    return _slices(num_tokens, max(16, _in_tiles(rows, device)))


def _in_tiles(count: int, device: torch.device) -> int:
    if device.type == "cpu" or count < GPU_TILE:
        return count
    return count // GPU_TILE * GPU_TILE


def _most_tokens(device: torch.device) -> int:
    return CHUNK_TOKENS if device.type == "cpu" else GPU_CHUNK_TOKENS


def _elements(device: torch.device) -> int:
    return CHUNK_ELEMENTS * (1 if device.type == "cpu" else GPU_FACTOR)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Give ``hidden @ weight.T`` [T, V], in their dtype."""
    return torch.nn.functional.linear(hidden, weight)


def wide(logits: Tensor) -> Tensor:
    """Logits in fp32 (fp64 for fp64)."""
    return logits.to(accumulator(logits.dtype))


def law_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over words, in place, and the log-sum-exp."""
    top = logits.amax(1)
    law = logits.sub_(top[:, None]).exp_()
    total = law.sum(1)
    return law.div_(total[:, None]), top + total.log()


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum ``a * b`` over the words of each row."""
    out: Tensor = torch.linalg.vecdot(a, b)  # bmm sums one after the other: three digits less
    return out


def pick_label(logits: Tensor, at: Tensor) -> Tensor:
    """``logits[i, at[i]]``, 0 where ``at`` lies outside."""
    inside = (at >= 0) & (at < logits.shape[1])
    at = at.clamp(0, logits.shape[1] - 1)
    return torch.where(inside, logits.gather(1, at[:, None])[:, 0], 0.0)


def add_at_label_(grad: Tensor, at: Tensor, value: Tensor) -> None:
    """Add ``value[i]`` to ``grad[i, at[i]]``, nowhere where ``at`` lies outside."""
    inside = (at >= 0) & (at < grad.shape[1])
    at = at.clamp(0, grad.shape[1] - 1)
    grad.scatter_add_(1, at[:, None], torch.where(inside, value, 0.0)[:, None])


def plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Give ``total + a @ b``: several products add up in fp32 (fp64 for fp64), a single one stays as it is."""
    if total is None:
        return a @ b
    total = total.to(accumulator(a.dtype))
    if total.dtype == a.dtype:
        return total.addmm_(a, b)
    total += a @ b
    return total


def whole(total: Tensor | None, like: Tensor) -> Tensor:
    """A result of `plus_product` in the dtype of ``like``; like it and 0 where no product came."""
    return torch.zeros_like(like) if total is None else total.to(like.dtype)


def joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Rows of all pieces, in the dtype of ``like``; like it and 0 where there are none."""
    if not pieces:
        return torch.zeros_like(like)
    cast = [piece.to(like.dtype) for piece in pieces]
    return cast[0] if len(cast) == 1 else torch.cat(cast)


_rows: Held[Tensor] = Held(HELD_MASKS)


def pick_rows(mask: Tensor | None, *tensors: Tensor, comes_again: bool = False) -> tuple[Any, ...]:
    """The index of the rows where ``mask`` holds (None: all of them), and these rows of each tensor.

    The host waits for the device to count the rows, for a mask that ``comes_again`` once.
    """
    if mask is None:
        return None, *tensors
    at = _rows.get((mask,), (), mask.nonzero) if comes_again else mask.nonzero()
    if len(at) == len(mask):
        return None, *tensors
    at = at[:, 0]
    return at, *(tensor[at] for tensor in tensors)


def put_rows(x: Tensor, at: Tensor | None, num_rows: int) -> Tensor:
    """Spread what `pick_rows` picked over ``num_rows`` rows, 0 elsewhere."""
    return x if at is None else x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, at, x)


class RowValues:
    """Vectors over all rows, filled chunk by chunk in the rows that `pick_rows` picked; 0 elsewhere.

    Args:
        number: of vectors.
        at: the index of the rows; None: all of them.
        num_rows: of each vector.
        like: in whose accumulator's dtype, and on whose device.
    """

    def __init__(self, number: int, at: Tensor | None, num_rows: int, like: Tensor) -> None:
        self._at = at
        make = like.new_empty if at is None else like.new_zeros
        self.vectors = [make(num_rows, dtype=accumulator(like.dtype)) for _ in range(number)]

    def put(self, rows: slice, *values: Tensor) -> None:
        """Fill the ``rows`` of those picked in every vector."""
        at = None if self._at is None else self._at[rows]
        for vector, value in zip(self.vectors, values, strict=True):
            if at is None:
                vector[rows] = value
            else:
                vector.index_copy_(0, at, value)

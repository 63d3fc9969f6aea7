"""Logits in chunks: which rows and words belong together, and what is done to one chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

CHUNK_ELEMENTS = 1 << 22
"""Logits of one chunk, which then stays near the cache through its elementwise steps."""
GPU_FACTOR = 8
"""How many times as many on a GPU, whose kernels must outlast their launches: 128 MiB in fp32."""
CHUNK_TOKENS = 1024
"""Most rows of one chunk where the vocabulary is cut too."""


def token_chunks(num_tokens: int) -> list[slice]:
    """Rows that go together where `vocabulary_chunks` cuts the vocabulary."""
    return _slices(num_tokens, CHUNK_TOKENS)


def vocabulary_chunks(num_tokens: int, num_words: int, device: torch.device) -> list[slice]:
    """Words that go together with one of the `token_chunks` of ``num_tokens`` rows."""
    rows = min(num_tokens, CHUNK_TOKENS)
    return _slices(num_words, max(1, _elements(device) // max(1, rows)))


def full_law_chunks(num_tokens: int, num_words: int, device: torch.device) -> list[slice]:
    """Rows that go together where two laws are compared, which need the whole vocabulary at once."""
    return _slices(num_tokens, max(16, 2 * _elements(device) // max(1, num_words)))


def _elements(device: torch.device) -> int:
    return CHUNK_ELEMENTS * (1 if device.type == "cpu" else GPU_FACTOR)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def logits_of(hidden: Tensor, weight: Tensor, heat: Tensor | None = None) -> Tensor:
    """Give ``hidden @ weight.T / heat`` [T, V], fp32 (fp64 for fp64)."""
    logits = torch.nn.functional.linear(hidden, weight).to(accumulator(hidden.dtype))
    return logits if heat is None else logits.div_(heat)


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


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, which may have a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def pick_rows(mask: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
    """The index of the rows where ``mask`` holds (None: all of them), and these rows of each tensor."""
    if mask is None:
        return None, *tensors
    at = mask.nonzero()[:, 0]  # the one time that the host waits
    if len(at) == len(mask):
        return None, *tensors
    return at, *(tensor[at] for tensor in tensors)


def put_rows(x: Tensor, at: Tensor | None, num_rows: int) -> Tensor:
    """Spread what `pick_rows` picked over ``num_rows`` rows, 0 elsewhere."""
    return x if at is None else x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, at, x)

"""A small case against plain products, once a process, before a kernel is trusted."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from .interface import Backend
from .products import Math

ROWS = 136
"""More than one tile of any kernel."""
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative error in norm."""

_lock = threading.Lock()
_results: dict[tuple[object, ...], str | None] = {}


def probe(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> str | None:
    """Say how the backend failed on a small case, or None: right forward and backward.

    Half of the softmax comes from elsewhere, so the backward gets a merged out and lse.
    """
    key = (backend.name, device, dtype, head_dim, value_dim)
    with _lock:
        if key not in _results:
            _results[key] = _run(backend, device, dtype, head_dim, value_dim)
        return _results[key]


def _run(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> str | None:
    draw = torch.Generator().manual_seed(0)

    def random(heads: int, dim: int) -> Tensor:
        return torch.randn(ROWS, heads, dim, generator=draw, dtype=torch.float64).to(device, dtype)

    q, k, v = random(4, head_dim), random(2, head_dim), random(2, value_dim)
    grad, rest = random(4, value_dim), random(4, value_dim)
    worst, bound = 0.0, BOUNDS[dtype]
    for causal in (True, False):
        options: dict[str, Any] = {"mask": None, "causal": causal, "scale": head_dim**-0.5}
        want_out, want_lse = Math().forward(*_upcast(q, k, v), **options)
        total = torch.logaddexp(want_lse, torch.zeros_like(want_lse))
        share = (want_lse - total).exp()[..., None]
        merged = (want_out * share + rest.to(share) * (1 - share)).to(dtype)
        high = _upcast(grad, q, k, v, merged, total)
        want = Math().backward(*high, **options)
        try:
            out, lse = backend.forward(q, k, v, **options)
            got = backend.backward(grad, q, k, v, merged, total.to(lse), **options)
        except Exception as error:
            return f"its probe failed: {error}"
        for part, expected in zip((out, lse, *got), (want_out, want_lse, *want), strict=True):
            worst = max(worst, _error(part, expected))
    # NaN is no error that passes
    return None if worst <= bound else f"its probe is off by {worst:.1e}, more than {bound:.0e}"


def _upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)


def _error(x: Tensor, expected: Tensor) -> float:
    error = float((x.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")

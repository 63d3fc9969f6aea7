"""Checks of what users pass to declared operators; every message names the user's line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from spec_compile.errors import ConfigError

from .meta import user_line
from .reference import Branch


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: Sequence[Branch],
    sinks: Tensor | None,
    *,
    scale: float | None,
    window: int | None,
) -> None:
    """Refuse operands of `ops.branch_attention` that do not fit together.

    Raises:
        ConfigError: names the line, what was expected and what was found.
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3:
        _refuse(
            "branch_attention needs q [R, Hq, D], k_main [T, Hkv, D], v_main [T, Hkv, Dv]; found "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or window < 1
    ):
        _refuse(
            "branch_attention: window must be a positive int, the number of main keys below the limit "
            f"that are visible, or None for all; found {window!r}"
        )
    if scale is not None and not _is_finite(scale):
        _refuse(f"branch_attention: scale must be a finite number or None, found {scale!r}")
    for name, key, value in [
        ("main", k, v),
        *((f"branch {i}", *b[:2]) for i, b in enumerate(branches)),
    ]:
        fits = key.ndim == value.ndim == 3 and key.shape[:2] == value.shape[:2]
        fits = fits and key.shape[1] == k.shape[1] and key.shape[2] == q.shape[2]
        if not fits or value.shape[2] != v.shape[2] or q.shape[1] % k.shape[1]:
            _refuse(
                f"branch_attention: {name} keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit "
                f"queries {tuple(q.shape)}; need equal lengths and head dims, and Hq a multiple of Hkv"
            )
    for i, (key, _, k_group, q_group) in enumerate(branches):
        _check_length(f"k_group of branch {i}", k_group, key, "its keys")
        _check_length(f"q_group of branch {i}", q_group, q, "q")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        _refuse(f"branch_attention: sinks must be [Hq={q.shape[1]}], found {tuple(sinks.shape)}")


def numbers(name: str, value: Tensor, rows: Tensor, owner: str) -> Tensor:
    """Row or document numbers as int64, one for each row of ``rows``.

    Raises:
        ConfigError: another length, or no integers.
    """
    _check_length(name, value, rows, owner)
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        _refuse(f"{name} must hold integers, found {value.dtype}; convert it with .long()")
    return value if value.dtype == torch.int64 else value.long()


def _check_length(name: str, value: Tensor, rows: Tensor, owner: str) -> None:
    if not isinstance(value, Tensor) or value.ndim != 1 or value.shape[0] != rows.shape[0]:
        found = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        _refuse(
            f"{name} must have one entry for each row of {owner} [{rows.shape[0]}], found {found}"
        )


def _is_finite(scale: object) -> bool:
    return not isinstance(scale, bool) and isinstance(scale, (int, float)) and math.isfinite(scale)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{user_line()}\n  {message}")

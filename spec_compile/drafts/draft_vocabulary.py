"""A draft's own, smaller vocabulary: which of the target's tokens it can propose.

Public files hold ``d2t``, int64 [V_d]: offsets, the target's id of draft token ``i`` is ``i + d2t[i]``; and ``t2d``,
bool [V]: whether the draft knows a token. Here both are always explicit; a map that is missing is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ConfigError


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Choose the tokens that come most often, ascending; of equally frequent ones the lower ids.

    Args:
        counts: [V], how often each token came where a loss counts it.
        size: V_d.

    Returns:
        int64 [V_d].

    Raises:
        ConfigError: there are not so many tokens, or ``counts`` is no vector.
    """
    if not isinstance(counts, Tensor) or counts.ndim != 1:
        found = tuple(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
        raise ConfigError(
            f"counts must be a tensor [V], one number for each token of the target, found {found}; count ids with "
            "torch.bincount(ids.flatten(), minlength=V)"
        )
    if not 0 < size <= counts.shape[0]:
        raise ConfigError(f"a draft vocabulary of {size} of {counts.shape[0]} tokens is impossible")
    order = counts.sort(descending=True, stable=True).indices
    return order[:size].sort().values


def offsets_of(tokens: Tensor) -> Tensor:
    """Write ids of the target, int64 [V_d], as ``d2t``."""
    return tokens - torch.arange(tokens.shape[0], device=tokens.device)


def tokens_of(offsets: Tensor) -> Tensor:
    """Read ids of the target from ``d2t``."""
    return offsets + torch.arange(offsets.shape[0], device=offsets.device)


def as_ids(family: str, given: Any) -> Tensor:
    """Read what a caller passes as ``draft_vocab``: int64 [V_d] on the CPU.

    Raises:
        ConfigError: it is a number of tokens, a mask, or no vector of integers.
    """
    if isinstance(given, int):
        raise ConfigError(
            f"{family}: draft_vocab must hold the target's ids that the draft can propose, found the number {given}; "
            f"choose them, for instance with sc.drafts.most_frequent(counts, {given})"
        )
    try:
        ids = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is not None and ids.dtype == torch.bool:
        raise ConfigError(
            f"{family}: draft_vocab must hold ids, found a bool mask of shape {tuple(ids.shape)}; pass "
            "mask.nonzero()[:, 0]"
        )
    if ids is None or ids.is_floating_point() or ids.is_complex() or ids.ndim != 1:
        found = type(given).__name__ if ids is None else f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ConfigError(
            f"{family}: draft_vocab must be int64 [V_d], the target's ids, ascending, found {found}; "
            "sc.drafts.most_frequent(counts, size) chooses them"
        )
    return ids.to(torch.int64)


def check_tokens(family: str, tokens: Tensor | None, size: int, vocab_size: int) -> Tensor:
    """Give the ids as int64.

    Raises:
        ConfigError: there are none, or they are not ``size`` ascending ids of the target.
    """
    if tokens is None:
        raise ConfigError(
            f"{family}: a vocabulary of {size} of the target's {vocab_size} tokens needs its map; pass draft_vocab="
            "ids (ascending; sc.drafts.most_frequent chooses them), or read a file that holds d2t"
        )
    ids = as_ids(family, tokens)
    fits = len(ids) == size and bool((ids[1:] > ids[:-1]).all())
    if not fits or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise ConfigError(
            f"{family}: draft_vocab must hold {size} distinct ids below {vocab_size}, ascending, found "
            f"{ids.flatten()[:5].tolist()}... of shape {tuple(ids.shape)}"
        )
    return ids


def read_map(
    family: str, tensors: Mapping[str, Tensor], size: int, vocab_size: int
) -> Tensor | None:
    """The ids that a file's ``d2t`` names; None for the whole vocabulary.

    Raises:
        ConfigError: the map is missing, or is no map of these sizes.
    """
    offsets = tensors.get("d2t")
    if size == vocab_size:
        if offsets is not None and bool(offsets.any()):
            raise ConfigError(
                f"{family}: d2t of the whole vocabulary of {vocab_size} tokens must be all zeros; a reduced one needs "
                "its draft_vocab_size in the configuration"
            )
        return None
    tokens = None if offsets is None else tokens_of(offsets)
    return check_tokens(family, tokens, size, vocab_size)

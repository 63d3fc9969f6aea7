"""What a batch's parts must look like, one check a part; every message says what to do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from .errors import BatchError

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def need_tensor(name: str, value: object) -> None:
    """Refuse anything that is not a tensor."""
    if not isinstance(value, Tensor):
        raise BatchError(
            f"{name} must be a torch.Tensor, found {type(value).__name__}; use torch.tensor(...)"
        )


def need_device(name: str, value: object, device: torch.device) -> None:
    """Refuse a tensor on another device than the tokens'."""
    if isinstance(value, Tensor) and value.device != device:
        raise BatchError(f"{name} must be on {device} like the tokens, found {value.device}")


def need_vector(name: str, value: object, length: int | None) -> None:
    """Refuse anything but a vector (of ``length``)."""
    need_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.ndim != 1 or (length is not None and value.shape[0] != length):
        expected = "one-dimensional" if length is None else f"[T={length}]"
        raise BatchError(
            f"{name} must be {expected}, found shape {list(value.shape)}; "
            "pack padded rows with PackedBatch.from_padded"
        )


def check_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the tokens, contiguous."""
    need_tensor("tokens", tokens)
    need_vector("tokens", tokens, None)
    if tokens.dtype != torch.int64:
        raise BatchError(f"tokens must be int64, found {tokens.dtype}; call .long() on them")
    bad = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if bad.numel():
        row = int(bad[0, 0])
        raise BatchError(
            f"tokens[{row}] is {int(tokens[row])}, outside 0..{vocab_size - 1} "
            f"({bad.shape[0]} such ids); the batch and the target do not share a vocabulary"
        )
    return tokens.contiguous()


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int | None = None) -> list[int]:
    """Return the documents' lengths; ``num_tokens`` None takes the last offset's word for T."""
    need_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise BatchError(f"cu_seqlens must be [N + 1], found shape {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in INTEGERS:
        raise BatchError(f"cu_seqlens must be int64 or int32, found {cu_seqlens.dtype}")
    offsets: list[int] = cu_seqlens.tolist()
    num_tokens = offsets[-1] if num_tokens is None else num_tokens
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise BatchError(
            f"cu_seqlens must run from 0 to T={num_tokens}, found {offsets[0]} to {offsets[-1]}; "
            "it holds the start of each document and then the number of tokens"
        )
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    for number, length in enumerate(lengths):
        if length < 0:
            raise BatchError(
                f"cu_seqlens must not decrease, found {offsets[number]} then {offsets[number + 1]} "
                f"at document {number}"
            )
    return lengths


def check_mask(name: str, mask: Tensor, tokens: Tensor) -> Tensor:
    """Return the mask."""
    need_vector(name, mask, tokens.shape[0])
    if mask.dtype != torch.bool:
        raise BatchError(f"{name} must be bool, found {mask.dtype}; call .bool() on it")
    return mask


def check_fields(fields: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return the fields as a dict."""
    if not isinstance(fields, Mapping):
        raise BatchError(f"fields must map names to tensors, found {type(fields).__name__}")
    length = tokens.shape[0]
    for name, value in fields.items():
        if not isinstance(name, str):
            raise BatchError(f"names of fields must be str, found {name!r}")
        need_tensor(f"fields[{name!r}]", value)
        if value.ndim == 0 or value.shape[0] != length:
            raise BatchError(
                f"fields[{name!r}] must be [T={length}, ...], one value a token, "
                f"found shape {list(value.shape)}"
            )
    return dict(fields)


def check_anchors(anchors: Tensor, tokens: Tensor) -> Tensor:
    """Return the anchors."""
    need_vector("anchors", anchors, None)
    if anchors.dtype != torch.int64:
        raise BatchError(f"anchors must be int64, found {anchors.dtype}; call .long() on them")
    used = anchors[anchors != -1]
    if not bool((anchors[: used.shape[0]] == used).all()):
        raise BatchError(
            "anchors must hold their unused entries (-1) last, found one before an anchor; move it"
        )
    outside = used[(used < 0) | (used >= tokens.shape[0])]
    if outside.numel():
        raise BatchError(
            f"anchors must be rows 0..{tokens.shape[0] - 1}, found {int(outside[0])}; "
            "-1 marks an unused entry"
        )
    falling = (used[1:] <= used[:-1]).nonzero()
    if falling.numel():
        where = int(falling[0, 0])
        raise BatchError(
            f"anchors must be ascending, found {int(used[where])} then {int(used[where + 1])}; "
            "sort them and drop repeats"
        )
    return anchors

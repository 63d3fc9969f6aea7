"""Attention of packed new rows over cached sequences, also for transformers' attention interface.

Legend: T new rows, B sequences, n new rows of each, S cached positions, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.capture.attention import LocalMask, check_call, check_window, route
from spec_compile.errors import ConfigError

from .cache import KVCache, PackedRows

NAME = "spec_compile_rollout"

_call = threading.local()


@dataclass
class CachedCall:
    """One forward of new rows over a cache."""

    cache: KVCache
    rows: PackedRows
    layers: set[int] = field(default_factory=set)
    """Layers that attended so far."""


@contextlib.contextmanager
def cached_call(cache: KVCache, rows: PackedRows) -> Iterator[CachedCall]:
    """Let the model's attention read and extend ``cache``."""
    _call.current = CachedCall(cache, rows)
    try:
        yield _call.current
    finally:
        del _call.current


def attend(
    cache: KVCache,
    layer: int,
    rows: PackedRows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the new keys and values; attend each new row to what it sees of its own sequence.

    Args:
        cache: holds the earlier rows.
        layer: of the cache.
        rows: whose rows these are.
        q: [T, Hq, D].
        k: [T, Hkv, D].
        v: [T, Hkv, Dv].
        scale: of the scores; None is 1 / sqrt(D).
        window: visible positions, the row's own included.
        sinks: [Hq], scores that enter the denominator alone.

    Returns:
        [T, Hq, Dv].
    """
    cache.write(layer, rows, k, v)
    parts = []
    for number, group in enumerate(rows.groups):
        keys, values = cache.read(layer, group)
        size = group.num_slots * group.count
        new = q[group.first_row : group.first_row + size].unflatten(0, (group.num_slots, -1))
        fits = window is None or window >= group.length
        if rows.causal and group.count == group.length and fits and sinks is None:
            parts.append(_causal(new, keys, values, scale).flatten(0, 1))
        else:
            mask = rows.mask(number, window, q.dtype)
            parts.append(_masked(new, keys, values, mask, scale, sinks).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attend where nothing was cached; q [B, n, Hq, D], k and v [B, Hkv, n, D]."""
    share = q.shape[2] // k.shape[1]
    keys, values = (x.repeat_interleave(share, 1) for x in (k, v))
    out: Tensor = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, is_causal=True, scale=scale
    )
    return out.transpose(1, 2)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with query heads that share keys folded into rows: no key is copied.

    q [B, n, Hq, D], k and v [B, Hkv, S, D], mask [B, n, S].
    """
    batch, count, heads, dim = q.shape
    share = heads // k.shape[1]
    folded = q.view(batch, count, k.shape[1], share, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    wide = mask[:, None, None].expand(-1, 1, share, -1, -1).flatten(2, 3)
    if sinks is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=wide, scale=scale)
    else:
        scores = folded @ k.transpose(-1, -2) * (dim**-0.5 if scale is None else scale) + wide
        column = sinks.to(scores.dtype).view(1, -1, share, 1, 1).expand(batch, -1, -1, count, 1)
        joined = torch.cat((scores, column.flatten(2, 3)), -1).softmax(-1)
        out = joined[..., :-1] @ v
    split: Tensor = out.unflatten(2, (share, count))
    return split.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _model_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Serve one layer's [1, H, T, D] heads; refuse what the cache cannot express."""
    where = check_call(module, attention_mask, is_causal, softcap, ConfigError)
    check_window(where, attention_mask, sliding_window, ConfigError)
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ConfigError(f"{where} has no layer_idx, so its keys cannot be cached")
    call: CachedCall = _call.current
    call.layers.add(layer)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(
        call.cache, layer, call.rows, q, k, v,
        scale=scaling, window=sliding_window, sinks=s_aux,
    )  # fmt: skip
    return out[None], None


def install(model: Any) -> None:
    """Make a (copied) transformers model attend through `attend`.

    Raises:
        ConfigError: the model does not use transformers' attention interface.
    """
    route(model, NAME, _model_attention, ConfigError)

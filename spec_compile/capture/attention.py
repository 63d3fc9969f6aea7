"""Adaptor for transformers' attention interface: one declared node a layer that carries document ids."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from spec_compile.errors import CaptureError, SpecCompileError
from spec_compile.ir.ops import branch_attention

NAME = "spec_compile"

_row = threading.local()


@dataclass(frozen=True)
class LocalMask:
    """Stands for the mask of a layer that does not see all earlier keys; the layer must say so itself."""

    size: int
    """Of its window, or of its chunks."""


@contextlib.contextmanager
def packed_row(document: Tensor, index: Tensor) -> Iterator[None]:
    """Give the adaptor the document number and row index of every row of the packed row, both [T]."""
    _row.vectors = (document, index)
    try:
        yield
    finally:
        del _row.vectors


def row_vectors() -> tuple[Tensor, Tensor]:
    """Document number and row index of every row of the packed row that is being traced."""
    vectors: tuple[Tensor, Tensor] = _row.vectors
    return vectors


def attention(
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
    """Emit one `branch_attention` for [1, H, T, D] heads; refuse what it cannot express.

    The mask argument holds no mask here (see `mask`): visibility comes from document ids and the window
    alone, so packing cannot be lost.
    """
    where = check_call(module, attention_mask, is_causal, softcap, CaptureError)
    check_window(where, attention_mask, sliding_window, CaptureError)
    if dropout:
        raise CaptureError(f"{where} has active attention dropout {dropout}: set it to 0")
    document, index = row_vectors()
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = branch_attention(
        q,
        k,
        v,
        q_limit=index + 1,
        q_document=document,
        k_document=document,
        scale=scaling,
        window=sliding_window,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def check_call(
    module: nn.Module,
    attention_mask: Tensor | LocalMask | None,
    is_causal: bool | None,
    softcap: float | None,
    error: type[SpecCompileError],
) -> str:
    """Name the calling layer, and refuse attention that is not causal, capped, or masked by the model.

    Raises:
        SpecCompileError: of the class ``error``.
    """
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if not getattr(module, "is_causal", True) or is_causal is False:
        raise error(
            f"{where} is not causal: bidirectional attention in a target is not supported; "
            "use a causal language model"
        )
    if softcap:
        raise error(f"{where} caps its attention scores (softcap={softcap}): not supported yet")
    if attention_mask is not None and not isinstance(attention_mask, LocalMask):
        raise error(f"{where} passes a mask of its own: expected masks from documents alone")
    return where


def check_window(
    where: str,
    attention_mask: Tensor | LocalMask | None,
    sliding_window: int | None,
    error: type[SpecCompileError],
) -> None:
    """Refuse a layer whose mask and argument ``sliding_window`` differ: transformers would follow the mask.

    Raises:
        SpecCompileError: of the class ``error``.
    """
    masked = attention_mask.size if isinstance(attention_mask, LocalMask) else None
    if masked != sliding_window:
        raise error(
            f"{where} has a mask of {'all earlier keys' if masked is None else f'{masked} keys (window or chunk)'} but "
            f"calls attention with sliding_window={sliding_window}: not supported; both must be the same window"
        )


def mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> LocalMask | None:
    """Build no mask, but say whether the layer sees all earlier keys: `attention` reads documents instead."""
    return None if local_size is None else LocalMask(local_size)


def install(model: Any) -> None:
    """Make a (copied) transformers model attend through `attention`.

    Raises:
        CaptureError: the model does not use transformers' attention interface.
    """
    route(model, NAME, attention, CaptureError)


def route(
    model: Any, name: str, function: Callable[..., Any], error: type[SpecCompileError]
) -> None:
    """Make a transformers model call ``function`` for attention, without masks of the model's making.

    Raises:
        SpecCompileError: of the class ``error``: the model does not use transformers' attention interface.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    if not hasattr(model, "set_attn_implementation"):
        raise error(
            f"{type(model).__name__} has no set_attn_implementation: expected a transformers causal language "
            "model whose attention goes through AttentionInterface"
        )
    model.set_attn_implementation(name)

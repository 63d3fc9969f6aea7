"""FlexAttention while a draft is traced: its masks become dense boolean ones, which a pass then recognises.

Its own functions cut a mask into blocks whose number would become a constant of the graph, and map it with a
transform that cannot be traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from spec_compile.errors import PlanError
from spec_compile.ir.meta import set_spelling, user_line

from .call_watch import last_node

DECLARED = (
    "write sc.branch_attention(q, k, v, branches, q_limit=..., q_document=..., k_document=...)"
)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskRule:
    """What stands for a BlockMask: its rule, not its blocks."""

    mask_mod: MaskMod


def create_mask(
    mod_fn: MaskMod, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None
) -> Tensor:
    """Evaluate a rule for all queries and keys at once, bool [B or 1, H or 1, Q, K]."""
    sizes = (B or 1, H or 1, Q_LEN, KV_LEN)
    return _on_grid(mod_fn, sizes, device).expand(sizes)


def _on_grid(mod_fn: MaskMod, sizes: tuple[Any, ...], device: Any) -> Tensor:
    """Evaluate a rule; a dimension that it does not read is 1, or missing in front."""
    grid = [
        torch.arange(size, device=device).view([-1 if d == at else 1 for d in range(4)])
        for at, size in enumerate(sizes)
    ]
    return mod_fn(*grid)


def create_block_mask(
    mask_mod: MaskMod, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, *args: Any, **options: Any
) -> MaskRule:
    """Keep the rule; how it is cut into blocks is of no interest here."""
    if any(size not in (None, 1) for size in (B, H)):
        _refuse(f"create_block_mask(B={B}, H={H}) makes a mask for each batch or head; use None")
    return MaskRule(mask_mod)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **options: Any,
) -> Tensor:
    """Attend with the dense mask."""
    if score_mod is not None:
        _refuse(
            "flex_attention with a score_mod is not supported, and sc.branch_attention has no biases of scores either; "
            "leave it out, and give positions to q and k (rotary) or to the states"
        )
    if return_lse or any(v is not None for v in options.values()):
        _refuse(f"flex_attention that returns more than its output is not supported; {DECLARED}")
    mask = None
    if block_mask is not None:
        sizes = (1, query.shape[-3], query.shape[-2], key.shape[-2])
        mask = _on_grid(block_mask.mask_mod, sizes, query.device)
        # FlexAttention asks it of every head, H=None or not
        if mask.ndim > 2 and mask.shape[-3] != 1:
            _refuse(
                "flex_attention has a mask_mod that reads the head: one mask for all heads is supported"
            )
        mask = mask.expand(1, 1, *sizes[2:])
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    if (node := last_node()) is not None:
        set_spelling(node, "flex_attention")
    return out


STAND_INS: dict[str, Callable[..., Any]] = {
    "create_mask": create_mask,
    "create_block_mask": create_block_mask,
    "flex_attention": flex_attention,
}


@contextlib.contextmanager
def flex_spellings(draft: nn.Module) -> Iterator[None]:
    """Replace FlexAttention's functions wherever they were imported to, and where a draft's parts hold them."""
    stand_ins = {id(getattr(flex, name)): made for name, made in STAND_INS.items()}
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
    for holder in [*sys.modules.values(), *draft.modules()]:
        names = getattr(holder, "__dict__", {})
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if (made := stand_ins.get(id(_uncompiled(value)))) is not None:
                replaced.append((names, name, value, made))
    try:
        for names, name, _, made in replaced:
            names[name] = made
        yield
    finally:
        for names, name, value, _ in replaced:
            names[name] = value


def _uncompiled(value: Any) -> Any:
    """The function that `torch.compile` was given; other values as they are, which may be lazy ones."""
    if type(value) is not FunctionType:
        return value
    return value.__dict__.get("_torchdynamo_orig_callable", value)


def _refuse(message: str) -> NoReturn:
    raise PlanError(f"{user_line()}\n  {message}")

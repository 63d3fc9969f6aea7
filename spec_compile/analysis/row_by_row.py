"""Which whole values can be made of own rows: each row of theirs is made of the same row of others."""

from __future__ import annotations

import torch
from torch.fx import Node

from spec_compile.ir.meta import info
from spec_compile.ir.placement import Kind

from .sizes import Rows

aten = torch.ops.aten
BESIDES_POINTWISE = (aten.to.dtype, aten.unsqueeze.default)


def is_full(node: Node) -> bool:
    """Whether a value has the rows of the whole packed row."""
    placement = info(node).placement
    return placement is not None and placement.kind == Kind.FULL


def is_row_by_row(node: Node, sizes: Rows) -> bool:
    """Whether own rows of a whole value are the same call on own rows of its inputs.

    That pays: positions are small, the tables of angles that are made of them are not.

    Args:
        node: a whole value.
        sizes: of its graph.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise not in target.tags and target not in BESIDES_POINTWISE:
        return False
    if any(isinstance(x, Node) for x in node.kwargs.values()):
        return False
    whole = [x for x in node.all_input_nodes if is_full(x)]
    for other in node.all_input_nodes:
        placement = info(other).placement
        if other not in whole and (placement is None or placement.kind != Kind.REPLICATED):
            return False
    aligned = target == aten.unsqueeze.default or all(_behind(x) == _behind(node) for x in whole)
    return (
        bool(whole) and aligned and all(_entries(x, sizes) == _entries(node, sizes) for x in whole)
    )


def _behind(node: Node) -> int:
    """Dimensions after the rows, by which a broadcast aligns."""
    placement = info(node).placement
    assert placement is not None
    return int(node.meta["val"].ndim) - placement.dim


def _entries(node: Node, sizes: Rows) -> tuple[int, bool]:
    """Entries a row, and whether the rows are anchors."""
    placement = info(node).placement
    assert placement is not None
    size = node.meta["val"].shape[placement.dim]
    return sizes.multiple(size), sizes.anchored(size)

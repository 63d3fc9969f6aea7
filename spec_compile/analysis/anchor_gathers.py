"""Gathers of rows at anchors: which rows a block draft reads, known from anchors and slots alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from spec_compile.ir.edit import ancestors
from spec_compile.ir.placement import Kind, Placement, full, rows

from .row_rules import Refusal, argument, has_rows, rank
from .sizes import Rows

aten = torch.ops.aten
SIZES = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def gathered(node: Node) -> tuple[Node, Node] | None:
    """Source and index of ``x[index]``, ``x.index_select(0, index)`` or a vector's ``x.gather(0, index)``."""
    source, index = (node.args[0] if node.args else None), None
    if node.target == aten.index.Tensor:
        listed = list(node.args[1])  # type: ignore[arg-type]
        index = listed[0] if len(listed) == 1 else None
    elif node.target == aten.index_select.default and isinstance(source, Node):
        along = int(argument(node, "dim")) % max(rank(source), 1)
        index = argument(node, "index") if along == 0 else None
    elif node.target == aten.gather.default and isinstance(source, Node) and rank(source) == 1:
        index = argument(node, "index")
    found = isinstance(source, Node) and isinstance(index, Node)
    return (source, index) if found else None  # type: ignore[return-value]


def is_row_gather(node: Node, places: Mapping[Node, Placement]) -> bool:
    """Whether a node reads rows of the packed row at an index that is made of anchors."""
    found = gathered(node)
    if found is None or any(a not in places for a in found):
        return False
    source, index = (places[a] for a in found)
    return has_rows(source) and not source.anchored and index.anchored


def gather_placement(node: Node, places: Mapping[Node, Placement], sizes: Rows) -> Placement:
    """Placement of a row gather: one entry, or several, an anchor."""
    source, index = gathered(node) or (node, node)
    value = source.meta["val"]
    if index.meta["val"].dtype == torch.bool:
        raise Refusal("picks rows by a mask; gather them at anchors")
    if places[source].dim != 0 or sizes.multiple(value.shape[0]) != 1:
        raise Refusal("gathers from a value that has not one entry a row, rows first")
    if places[index].dim != 0:
        raise Refusal("gathers with an index whose first dimension is not the anchors'")
    _check_made_of_anchors(index)
    return full(0) if places[source].kind == Kind.FULL and places[source].batch else rows(0)


def _check_made_of_anchors(index: Node) -> None:
    """Refuse an index that is more than an elementwise function of anchors, slots, constants and T."""
    for node in ancestors([index], stop=_Numbers()):
        name = str(node.target)
        if node.op == "placeholder" and name != "anchors":
            raise Refusal(
                f"gathers rows at an index that depends on {name}; it must be a function of anchors, slots, "
                "constants and the number of rows"
            )


class _Numbers:
    """Sizes: where they are read from does not matter."""

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and isinstance(node.meta.get("val"), SIZES)

"""Row rules of the declared operators: attention, shifts, losses."""

from __future__ import annotations

from torch.fx import Node

from spec_compile.ir.meta import info
from spec_compile.ir.placement import Placement

from .row_rules import Refusal, Seen, has_rows
from .sizes import Rows


def attention_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Declared attention: every operand has rows first."""
    q, sinks = node.args[0], node.args[10]
    assert isinstance(q, Node)
    if not has_rows(seen[q]):
        raise Refusal("has queries that are neither rows of the packed row nor slots of anchors")
    for operand, place in seen.items():
        if operand is sinks:
            continue
        several = place.anchored and sizes.multiple(operand.meta["val"].shape[0]) > 0
        if place.dim != 0 or not (several or sizes.multiple(operand.meta["val"].shape[0]) == 1):
            raise Refusal(
                f"needs one entry a row, rows first, in {operand.name}; keys that are no rows "
                "(learned keys, several a row) are not supported yet"
            )
    for main in (a for a in node.args[1:3] if isinstance(a, Node)):
        if seen[main].anchored:
            raise Refusal("has main keys that are slots of anchors; make them a branch")
    if all(place.batch for place in seen.values()):
        raise Refusal("attends to values made from ids alone, without parameters")
    return 0


def shift_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Declared shift."""
    source = node.args[0]
    assert isinstance(source, Node)
    if (
        seen[source].dim != 0
        or seen[source].anchored
        or sizes.multiple(source.meta["val"].shape[0]) != 1
    ):
        raise Refusal("needs one entry a row, rows first")
    return 0


def first_rows_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Declared losses: hidden states with rows first, weights without."""
    for operand, place in seen.items():
        if has_rows(place) and place.dim != 0:
            raise Refusal(f"needs rows first in {operand.name}")
    for weight in (a for a in node.args[1:4:2] if isinstance(a, Node)):
        if has_rows(seen[weight]):
            raise Refusal("uses rows as a weight: it mixes every row with every other")
    source = node.args[0]
    assert isinstance(source, Node)
    return seen[source].dim


def expert_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Experts of a mixture: rows and their choice of experts, weights without rows."""
    chosen = node.args[3]
    for operand, place in seen.items():
        rows_first = operand in (node.args[0], chosen)
        if has_rows(place) != rows_first or (rows_first and place.dim != 0):
            raise Refusal("needs rows first in its rows and their experts, and nowhere else")
    return 0


def refuse_linear_attention(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """The gated delta rule: a state runs through all rows."""
    raise Refusal(
        f"is the linear attention of target layer {info(node).layer}: it carries a state from row to row, which is "
        "not supported over context-parallel ranks. Use cp=1; pp and dp work"
    )


def refuse_sdpa(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Undeclared attention."""
    raise Refusal(
        "is attention in a spelling that is not recognised yet; declare it with sc.branch_attention"
    )

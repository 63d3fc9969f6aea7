"""Token locality: which values hold rows, and proof that nothing but declared operators mixes them.

Every node is given a `Placement`. A value made from the batch alone stays whole on every rank; it is
cut to the rank's own rows where it meets parameters or activations. Only attention, shifts and plain
sums may look along the row dimension; everything else is refused with the user's source line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from spec_compile.errors import PlanError
from spec_compile.ir.meta import at_node
from spec_compile.ir.placement import PARTIAL, Kind, Placement, full, replicated, rows

from .anchor_gathers import gather_placement, gathered, is_row_gather
from .row_rules import KNOWN_ON_ROWS, Refusal, pointwise_rule
from .rule_table import LINEAR_ON_SUMS, RULES
from .sizes import Rows

WHOLE_ARGUMENTS = {  # arguments of declared operators that stay whole
    "spec_compile::branch_attention": ("k_document",),
    "spec_compile::shift": ("document",),
}


@dataclass
class Locality:
    """Placements of a graph, and the conversions that its nodes' arguments need."""

    placements: dict[Node, Placement] = field(default_factory=dict)
    cuts: set[tuple[Node, Node]] = field(default_factory=set)
    """(user, value): a whole value that the user needs as own rows."""
    sums: set[tuple[Node, Node]] = field(default_factory=set)
    """(user, value): a partial sum that the user needs complete."""


def analyse(graph: Graph, checked: Callable[[Node], bool]) -> Locality:
    """Place every node of a captured graph.

    Args:
        checked: whether a node must be token-local; others (the target at cp=1) get a best guess.

    Raises:
        PlanError: a checked node looks across rows; names its source line and what to use instead.
    """
    result = Locality()
    sizes = Rows(graph)
    for node in graph.nodes:
        try:
            result.placements[node] = _place(node, result, sizes)
        except Refusal as refusal:
            if checked(node):
                raise PlanError(_message(node, refusal)) from None
            dims = sizes.dims(node)
            result.placements[node] = rows(dims[0]) if dims else replicated(batch=False)
    return result


def _message(node: Node, refusal: Refusal) -> str:
    return at_node(
        node,
        f"{refusal}. Along the rows of the packed row only sc.branch_attention, sc.shift, gathers at anchors and "
        "plain sums are allowed, because other ranks hold the other rows",
    )


def _place(node: Node, result: Locality, sizes: Rows) -> Placement:
    if node.op == "placeholder":
        return _fits(node, full(0), sizes) if sizes.dims(node) else replicated(batch=True)
    if node.op == "get_attr":
        return replicated(batch=False)
    if node.op == "output":
        return replicated(batch=False)
    places = {a: result.placements[a] for a in node.all_input_nodes}
    if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _place_number(node, places)
    seen = _convert(node, places, result)
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    rule = None
    if isinstance(node.target, torch._ops.OpOverload):
        rule = RULES.get(f"{name}.{node.target._overloadname}") or RULES.get(name)
        if rule is None and torch.Tag.pointwise in node.target.tags:
            rule = pointwise_rule
    if is_row_gather(node, result.placements):
        return _fits(node, gather_placement(node, result.placements, sizes), sizes)
    if rule is None and callable(node.target) and getattr(node.target, "__name__", "") == "getitem":
        return _fits(node, seen[node.all_input_nodes[0]], sizes)
    if rule is None:
        if sizes.dims(node) or any(p.kind in (Kind.FULL, Kind.ROWS) for p in seen.values()):
            raise Refusal(f"is not known to keep rows apart; {KNOWN_ON_ROWS}")
        return replicated(batch=all(p.batch for p in seen.values()))
    return _fits(node, _finish(rule(node, seen, sizes), seen), sizes)


def _place_number(node: Node, places: dict[Node, Placement]) -> Placement:
    """Sizes are numbers, and so is what is read out of values that all ranks hold whole."""
    size = isinstance(node.target, torch._ops.OpOverload) and "::sym_" in node.target.name()
    tensors = [p for a, p in places.items() if isinstance(a.meta.get("val"), torch.Tensor)]
    if not size and any(p.kind in (Kind.FULL, Kind.ROWS, Kind.PARTIAL) for p in tensors):
        raise Refusal("reads a Python number out of rows or of their sum; keep it a tensor")
    return replicated(batch=True)


def _fits(node: Node, place: Placement, sizes: Rows) -> Placement:
    """Check a placement against the symbolic sizes: rows in the one place that it names, nowhere else."""
    value = node.meta.get("val")
    expected = [place.dim] if place.kind in (Kind.FULL, Kind.ROWS) else []
    for part in value if isinstance(value, (tuple, list)) else [value]:
        if not isinstance(part, torch.Tensor):
            continue
        multiples = {d: m for d, size in enumerate(part.shape) if (m := sizes.multiple(size))}
        if list(multiples) != expected or any(m < 0 for m in multiples.values()):
            raise Refusal(
                f"gives shape {tuple(part.shape)}, where rows are not apart in one dimension only"
            )
    if place.dim >= 0 and isinstance(value, torch.Tensor):
        return replace(place, anchored=sizes.anchored(value.shape[place.dim]))
    return place


def _finish(dim: int | Placement, seen: dict[Node, Placement]) -> Placement:
    if isinstance(dim, Placement):
        return dim
    batch = all(p.batch for p in seen.values())
    if dim < 0:
        return replicated(batch=batch)
    if batch:
        return full(dim)
    return rows(dim)


def _convert(node: Node, places: dict[Node, Placement], result: Locality) -> dict[Node, Placement]:
    """Apply the conversions that this node needs to its arguments, and record them."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    read_whole, read_by_rows = _whole_arguments(node, name)
    if is_row_gather(node, places):
        source, index = gathered(node) or (node, node)
        read_whole, read_by_rows = {index}, {source}
    whole = read_whole - read_by_rows
    tensors = {
        a: p
        for a, p in places.items()
        if isinstance(a.meta.get("val"), (torch.Tensor, tuple, list))
    }
    moving = {a: p for a, p in tensors.items() if a not in whole}
    local = any(not p.batch for p in moving.values())
    seen = dict(tensors)
    for a, p in tensors.items():
        if a in read_whole and p.kind != Kind.FULL:
            what = "an index" if is_row_gather(node, places) else "document numbers"
            raise Refusal(
                f"needs {what} made from ids alone, found {a.name} ({p}) that depends on activations"
            )
        if a not in whole and p.kind == Kind.FULL and local:
            result.cuts.add((node, a))
            seen[a] = replace(rows(p.dim), anchored=p.anchored)
        if p.kind == Kind.PARTIAL and not _keeps_partial(name, node, seen):
            result.sums.add((node, a))
            seen[a] = replicated(batch=False)
    return {a: p for a, p in seen.items() if a not in whole} or seen


def _whole_arguments(node: Node, name: str) -> tuple[set[Node], set[Node]]:
    """Values that a declared operator reads whole, and those that it reads by rows; one may be both."""
    wanted = WHOLE_ARGUMENTS.get(name, ())
    if not wanted:
        return set(), set()
    assert isinstance(node.target, torch._ops.OpOverload)
    found: tuple[set[Node], set[Node]] = set(), set()
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        found[argument.name not in wanted].update(_nodes(value))
    return found


def _nodes(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [v for v in value if isinstance(v, Node)] if isinstance(value, (list, tuple)) else []


def _keeps_partial(name: str, node: Node, places: dict[Node, Placement]) -> bool:
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    kinds = [p.kind for p in places.values()]
    mode = LINEAR_ON_SUMS.get(name)
    given = [a for a in node.args if isinstance(a, Node)]
    # one node in two places, q * q or q / q, is not linear in the sum
    if not _exact_on_sums(node) or (mode in ("scale", "product") and len(set(given)) < len(given)):
        return False
    if mode == "all":
        return all(k == Kind.PARTIAL for k in kinds)
    if mode == "scale":  # one sum times or over values without rows
        first = node.args[0] if node.args else None
        others = [p for a, p in places.items() if a is not first]
        return (
            isinstance(first, Node)
            and places[first].kind == Kind.PARTIAL
            and all(p.kind == Kind.REPLICATED for p in others)
        )
    if mode == "product":
        return kinds.count(Kind.PARTIAL) == 1 and all(
            k in (Kind.PARTIAL, Kind.REPLICATED) for k in kinds
        )
    return False


def _exact_on_sums(node: Node) -> bool:
    """Refuse constants that every rank would add, and roundings: they do not commute with sums."""
    value = node.meta.get("val")
    sources = [a.meta["val"] for a in node.all_input_nodes if "val" in a.meta]
    tensors = [v for v in sources if isinstance(v, torch.Tensor)]
    if getattr(node.target, "__name__", "").partition(".")[0] in ("add", "sub"):
        operands = [a.meta.get("val") if isinstance(a, Node) else a for a in node.args[:2]]
        if not all(isinstance(v, torch.Tensor) for v in operands):
            return False
    if node.kwargs.get("rounding_mode") is not None:
        return False
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return True
    return value.dtype != torch.bool and not any(v.is_floating_point() for v in tensors)


__all__ = ["PARTIAL", "Locality", "analyse"]

"""Take rows of several runs, joined in one dimension, apart again: every run is then rows of the packed row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.joined_rules import operator_name, tensor
from spec_compile.analysis.row_joins import SPLITS, cut_of, parted_runs
from spec_compile.analysis.row_rules import KNOWN_ON_ROWS, Refusal, argument, reduce_dims
from spec_compile.analysis.rule_table import is_loss
from spec_compile.errors import PlanError
from spec_compile.ir.edit import call
from spec_compile.ir.meta import at_node, info

from .base import Cap, PassResult
from .joined_rows import JoinedRows, MixedRows

aten = torch.ops.aten
NAME = "TakeRowsApart"
SUMMED = 2
"""Reduction of a loss operator."""
ADVICE = f"{KNOWN_ON_ROWS}, or take the rows of one run first, x[:T], where they were joined with torch.cat"


@dataclass(frozen=True, slots=True)
class TakeRowsApart:
    """``f(cat(a, b)).sum()`` becomes ``f(a).sum() + f(b).sum()``, and ``f(cat(a, b))[:T]`` becomes ``f(a)``.

    So depths that share one pass are rows of the packed row each, which the ranks cut alike.
    """

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.ROLES})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        changes = 0
        for rewrite in (_cut, _gathered_up):
            joined = JoinedRows(gm, NAME)
            for node in list(gm.graph.nodes) if joined.apart else ():
                try:
                    new = rewrite(node, joined)
                except Refusal:
                    continue  # named below, if it is a matter of runs
                if new is not None:
                    node.replace_all_uses_with(new)
                    changes += 1
            gm.graph.eliminate_dead_code()
        _refuse_what_is_left(gm)
        return PassResult(gm, changes)


def _cut(node: Node, joined: JoinedRows) -> Node | None:
    """The one run that a slice takes."""
    for dim in joined.dims(node):
        if cut_of(node, dim) is not None:
            parts = joined.parts(node, dim)
            return parts[0] if len(parts) == 1 else None
    return None


def _gathered_up(node: Node, joined: JoinedRows) -> Node | None:
    """A sum over all runs, or the runs in a dimension of their own."""
    if info(node).role == "target" or not _is_last(node, joined):
        return None
    operands = _summed(node, joined)
    if operands:
        return _sum(node, joined, operands)
    parted = parted_runs(node)
    if parted is None or (parted[0], parted[1]) not in joined.apart:
        return None
    source, dim, at = parted
    return _stacked(node, joined.runs(source, dim, node), at)


def _summed(node: Node, joined: JoinedRows) -> dict[Node, int]:
    """Operands whose runs a node adds up, and in which dimension."""
    name = operator_name(node)
    sources: list[Any] = [a for a in node.args[:2] if isinstance(a, Node)]
    if name == "sum":
        dims = reduce_dims(node)
        found = joined.dims(sources[0])
        kept = len(found) != 1 or (dims is not None and found[0] not in dims)
        return {} if kept else {sources[0]: found[0]}
    if is_loss(node) and argument(node, "reduction") == SUMMED:
        apart = all((a, 0) in joined.apart for a in sources)
        return dict.fromkeys(sources, 0) if apart and argument(node, "weight") is None else {}
    return {}


def _sum(node: Node, joined: JoinedRows, operands: dict[Node, int]) -> Node:
    parts = {a: joined.runs(a, d, node) for a, d in operands.items()}
    sizes = [[str(tensor(p).shape[operands[a]]) for p in ps] for a, ps in parts.items()]
    if any(other != sizes[0] for other in sizes):
        raise Refusal("adds up rows that were joined differently")
    total: Node | None = None
    for i in range(len(sizes[0])):
        given = {a: p[i] for a, p in parts.items()}
        one = joined.apply(node, -1, given, next(iter(operands.items())))
        total = one if total is None else _call(node, aten.add.Tensor, (total, one))
    assert total is not None
    return total


def _stacked(node: Node, parts: list[Node], at: int) -> Node:
    shape = tensor(node).shape
    if any(str(tensor(p).shape) != str(tensor(parts[0]).shape) for p in parts):
        raise Refusal("views runs of different lengths as one dimension")
    whole = [size for d, size in enumerate(shape) if d != at]
    if len(parts) != shape[at] or str(torch.Size(whole)) != str(tensor(parts[0]).shape):
        raise Refusal("views joined rows in another shape than their runs'")
    return _call(node, aten.stack.default, (parts, at))


def _call(node: Node, target: Any, args: Any) -> Node:
    with node.graph.inserting_before(node):
        return call(node.graph, target, args, like=node, origin=NAME)


def _refuse_what_is_left(gm: GraphModule) -> None:
    """Name the first operator that reads several runs at once.

    Raises:
        PlanError: with its line.
    """
    joined = JoinedRows(gm, NAME)
    for node in list(gm.graph.nodes) if joined.apart else ():
        for source in node.all_input_nodes:
            for dim in joined.dims(source) if _is_last(node, joined) else ():
                _refuse(node, source, dim, joined)
    gm.graph.eliminate_dead_code()  # parts that were only looked at


def _is_last(node: Node, joined: JoinedRows) -> bool:
    """Whether runs are followed no further than into a node's operands; what splits them goes with its parts."""
    split = operator_name(node) in SPLITS and any(joined.dims(user) for user in node.users)
    return not joined.dims(node) and not split


def _refuse(node: Node, source: Node, dim: int, joined: JoinedRows) -> None:
    try:
        parts = joined.parts(source, dim)
        if any(joined.sizes.multiple(tensor(p).shape[dim]) < 1 for p in parts):
            return  # rows and something else: the check of locality has more to say
        why = f"reads {len(parts)} runs of rows at once, joined in {source.name}"
    except MixedRows:
        return
    except Refusal as refusal:
        why = str(refusal)
    raise PlanError(at_node(node, f"{why}; {ADVICE}")) from None

"""Where runs of rows are joined to one dimension, and where they are taken out of it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from .joined_rules import along, operator_name, tensor
from .row_rules import argument, rank
from .sizes import product

CREATIONS = ("full", "zeros", "ones", "empty")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten")
SPLITS = ("split", "chunk", "split_with_sizes")


@dataclass(frozen=True)
class Cut:
    """A run of entries that is taken out of a dimension: from ``start`` to ``end``, both expressions or numbers."""

    source: Node
    start: Any
    end: Any


def joined_by_cat(node: Node, dim: int) -> list[Node]:
    """The values with rows that a node puts behind one another."""
    if operator_name(node) != "cat" or along(node) != dim:
        return []
    listed: Any = node.args[0]
    kept = [part for part in listed if not _is_empty(part)]
    symbolic = [isinstance(tensor(part).shape[dim], torch.SymInt) for part in kept]
    return kept if any(symbolic) else []


def repeated_rows(node: Node, dim: int) -> tuple[Node, int] | None:
    """Rows that a node puts behind themselves, and how many times; other dimensions stay."""
    if operator_name(node) not in ("repeat", "tile"):
        return None
    source: Any = node.args[0]
    times: Any = argument(node, "repeats", argument(node, "dims"))
    at = dim - rank(node) + rank(source)
    others = [t for d, t in enumerate(times) if d != dim - rank(node) + len(times)]
    count = times[dim - rank(node) + len(times)] if len(times) == rank(node) else 1
    rows = at >= 0 and isinstance(tensor(source).shape[at], torch.SymInt)
    plain = rank(source) == rank(node) and all(t == 1 for t in others)
    return (source, count) if rows and plain and isinstance(count, int) and count > 1 else None


def merged_runs(node: Node, dim: int) -> tuple[Node, int] | None:
    """A value [.., D, rows, ..] that a node views as [.., D * rows, ..], and the dimension of its D runs."""
    if operator_name(node) not in VIEWS:
        return None
    source: Any = node.args[0]
    return _merged(tensor(source).shape, tensor(node).shape, dim, source)


def parted_runs(node: Node) -> tuple[Node, int, int] | None:
    """A value [.., D * rows, ..] that a node views as [.., D, rows, ..], its row dimension, and that of the runs."""
    if operator_name(node) not in (*VIEWS, "unflatten"):
        return None
    source: Any = node.args[0]
    for dim in range(rank(source)):
        found = _merged(tensor(node).shape, tensor(source).shape, dim, node)
        if found is not None:
            return source, dim, found[1]
    return None


def _merged(apart: Any, together: Any, dim: int, node: Node) -> tuple[Node, int] | None:
    if not isinstance(together[dim], torch.SymInt):
        return None
    before, size = product(together[:dim]), product(together[dim : dim + 1])
    for d, runs in enumerate(apart[:-1]):
        rows = isinstance(runs, int) and runs > 1 and isinstance(apart[d + 1], torch.SymInt)
        if rows and product(apart[:d]) == before and product(apart[d : d + 2]) == size:
            return node, d
    return None


def cut_of(node: Node, dim: int) -> Cut | None:
    """What a slice, or one part of a split, takes along a dimension."""
    name = operator_name(node)
    if name in ("slice", "narrow") and along(node) == dim and argument(node, "step") in (None, 1):
        source: Any = node.args[0]
        total = product(tensor(source).shape[dim : dim + 1])
        start = _place(argument(node, "start"), 0, total)
        if name == "narrow":
            return Cut(source, start, start + _place(argument(node, "length"), 0, total))
        return Cut(source, start, _place(argument(node, "end"), total, total))
    if getattr(node.target, "__name__", "") != "getitem":
        return None
    split: Any = node.args[0]
    if operator_name(split) not in SPLITS or along(split) != dim:
        return None
    sizes = [product(part.shape[dim : dim + 1]) for part in split.meta["val"]]
    number: Any = node.args[1]
    first = sum(sizes[:number], start=sympy.Integer(0))
    return Cut(split.args[0], first, first + sizes[number])


def is_uniform(node: Node, dim: int) -> bool:
    """Whether a value is the same in every row, and is made as long as it is needed."""
    shape = tensor(node).shape
    if any(isinstance(size, torch.SymInt) for d, size in enumerate(shape) if d != dim):
        return False
    if operator_name(node) == "expand":
        source: Any = node.args[0]
        at = dim - rank(node) + rank(source)
        return at < 0 or str(tensor(source).shape[at]) == "1"
    return operator_name(node) in CREATIONS


def _place(value: Any, default: Any, total: Any) -> Any:
    """A place along a dimension, counted from its beginning."""
    if value is None:
        return default
    if isinstance(value, Node):
        value = value.meta["val"]
    place = value.node.expr if isinstance(value, torch.SymInt) else value
    if isinstance(place, int):
        return total if place >= 2**31 else total + place if place < 0 else place
    return total + place if place.is_negative or place.could_extract_minus_sign() else place


def _is_empty(node: Node) -> bool:
    return tuple(tensor(node).shape) == (0,)

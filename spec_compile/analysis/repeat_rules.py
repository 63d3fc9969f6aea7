"""Row rules of operators that repeat, pad or pair values."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from spec_compile.ir.placement import Placement

from .row_rules import Refusal, Seen, argument, has_rows, rank
from .sizes import Rows


def repeat_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Repeat and tile: never the rows; what has none may be repeated once a row."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if not has_rows(place):
        return next(iter(sizes.dims(node)), -1)
    times: Any = argument(node, "repeats", argument(node, "dims"))
    at = place.dim - rank(source) + len(times)
    if at >= 0 and times[at] != 1:
        raise Refusal("repeats rows behind one another")
    return place.dim - rank(source) + rank(node)


def repeat_interleave_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """repeat_interleave by a number: copies stay beside their row."""
    source = node.args[0]
    assert isinstance(source, Node)
    place, along = seen[source], argument(node, "dim")
    if not has_rows(place):
        return -1
    if along is None and place.dim != 0:
        raise Refusal("flattens rows that are not the first dimension")
    return place.dim


def broadcast_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """broadcast_tensors: every result has the joint shape."""
    ndim = max(rank(a) for a in seen)
    found = {place.dim - rank(a) + ndim for a, place in seen.items() if has_rows(place)}
    if len(found) > 1:
        raise Refusal("combines rows with other rows (an outer product over the packed row)")
    return found.pop() if found else -1


def outer_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Outer product of rows with a value that has none."""
    a, b = node.args[:2]
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    if has_rows(seen[a]) and has_rows(seen[b]):
        raise Refusal("combines rows with other rows (an outer product over the packed row)")
    return 0 if has_rows(seen[a]) else 1 if has_rows(seen[b]) else -1


def pad_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Pad: not before or behind the rows."""
    source, pad = node.args[:2]
    assert isinstance(source, Node)
    place = seen[source]
    after = 2 * (rank(source) - 1 - place.dim)
    if has_rows(place) and any(size != 0 for size in list(pad)[after : after + 2]):  # type: ignore[arg-type]
        raise Refusal("pads rows; use sc.shift to look at other rows")
    return place.dim

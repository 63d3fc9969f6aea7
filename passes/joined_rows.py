"""Values whose row dimension holds several runs of rows, taken apart: ``f(cat(a, b))`` is ``cat(f(a), f(b))``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.row_rules import Refusal, argument, rank
from spec_compile.analysis.shape_rules import transpose_rule
from spec_compile.analysis.sizes import Rows, product
from spec_compile.ir.edit import call
from spec_compile.ir.meta import info, update
from spec_compile.ir.placement import Kind, Placement

aten = torch.ops.aten
NAME = "RecogniseAttention"
Operands = dict[Node, int]
"""Operands that are to be taken apart, and along which dimension."""


class JoinedRows:
    """Take values apart along a dimension, back to where their rows were joined."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.sizes = Rows(gm.graph)
        self.known: dict[tuple[Node, int], list[Node]] = {}
        self.apart: set[tuple[Node, int]] = set()
        """Values and dimensions along which rows were joined."""
        for node in gm.graph.nodes:
            for dim in _symbolic_dims(node) if info(node).role != "target" else ():
                if self._is_apart(node, dim):
                    self.apart.add((node, dim))

    def parts(self, node: Node, dim: int) -> list[Node]:
        """Values that, joined along ``dim``, are the node's; each has rows of one kind.

        Raises:
            Refusal: an operator in between mixes rows, or is not known.
        """
        if (node, dim) not in self.apart:
            if self.is_joined(node, dim):
                raise Refusal(
                    f"has rows of several kinds that {node.target} ({node.name}) joins; join rows with torch.cat, and "
                    "use operators on them that act on each row alone"
                )
            return [node]
        if (node, dim) not in self.known:
            self.known[node, dim] = self._parts(node, dim)
        return self.known[node, dim]

    def slices(self) -> list[tuple[Node, list[Node]]]:
        """Slices of joined rows, with the parts that each takes."""
        found = []
        for node, dim in self.apart:
            source = node.args[0] if node.args else None
            cut = _name(node) == "slice" and _along(node) == dim and (source, dim) in self.apart
            if cut and node.users:
                found.append((node, self.parts(node, dim)))
        return found

    def is_joined(self, node: Node, dim: int) -> bool:
        """Whether a dimension's size is neither a constant nor a multiple of T or A alone."""
        return self.sizes.multiple(_value(node).shape[dim]) < 0

    def _is_apart(self, node: Node, dim: int) -> bool:
        if _joins(node, dim):
            return True
        if _name(node) == "slice" and _along(node) == dim:
            return (node.args[0], dim) in self.apart
        operands = self._operands(node, dim) or {}
        return any((a, d) in self.apart for a, d in operands.items())

    def _parts(self, node: Node, dim: int) -> list[Node]:
        if _joins(node, dim):
            listed: Any = node.args[0]
            joined = [part for part in listed if not _is_empty(part)]
            return [part for source in joined for part in self.parts(source, dim)]
        if _name(node) == "slice" and _along(node) == dim:
            return self._cut(node, dim)
        operands = self._operands(node, dim) or {}
        split = {a: self.parts(a, d) for a, d in operands.items()}
        lengths = [[self._size(p, operands[a]) for p in parts] for a, parts in split.items()]
        if any(other != lengths[0] for other in lengths):
            raise Refusal(f"combines rows in {node.name} that were joined differently")
        count = len(lengths[0])
        return [self._apply(node, dim, {a: p[i] for a, p in split.items()}) for i in range(count)]

    def _size(self, node: Node, dim: int) -> Any:
        size = _value(node).shape[dim]
        return size.node.expr if isinstance(size, torch.SymInt) else size

    def _cut(self, node: Node, dim: int) -> list[Node]:
        """Whole parts that a slice takes."""
        source: Any = node.args[0]
        parts = self.parts(source, dim)
        bounds, total = [0], 0
        for part in parts:
            total = total + self._size(part, dim)
            bounds.append(total)
        places = []
        for key, default in (("start", 0), ("end", total)):
            value = argument(node, key)
            place = _expression(value, default)
            place = total + place if _is_behind(place) else place
            if isinstance(place, int) and place >= 2**31:
                place = total
            places.append(next((i for i, b in enumerate(bounds) if _equal(b, place)), None))
        first, last = places
        if first is None or last is None or argument(node, "step") not in (None, 1):
            raise Refusal(f"cuts joined rows elsewhere than where they were joined ({node.name})")
        return parts[first:last]

    def _operands(self, node: Node, dim: int) -> Operands | None:
        """What to take apart for one operator; None where rows are not followed further."""
        rule = RULES.get(_name(node))
        if rule is None and isinstance(node.target, torch._ops.OpOverload):
            rule = _pointwise if torch.Tag.pointwise in node.target.tags else None
        if getattr(node.target, "__name__", "") == "getitem":
            rule = _same
        return None if rule is None or node.op != "call_function" else rule(node, dim)

    def _apply(self, node: Node, dim: int, given: dict[Node, Node]) -> Node:
        """The operator on one part of each operand."""
        args: Any = torch.fx.map_arg(node.args, lambda n: given.get(n, n))
        kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: given.get(n, n))
        with self.graph.inserting_before(node):
            if _name(node) in ("view", "reshape", "_unsafe_view", "expand"):
                size = self._length(next(iter(given.values())), node, dim, given)
                shape = [size if d == dim else int(s) for d, s in enumerate(_value(node).shape)]
                args = (args[0], shape)
            fake: Any = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            with _mode(node):
                val = node.target(*fake[0], **fake[1])  # type: ignore[operator]
            new = call(self.graph, node.target, args, like=node, origin=NAME, kwargs=kwargs, val=val)
        _keep_role(new)
        return new

    def _length(self, part: Node, node: Node, dim: int, given: dict[Node, Node]) -> Node:
        """Number of rows of a part, as a node."""
        source = next(iter(given))
        along = (self._operands(node, dim) or {})[source]
        new = call(self.graph, aten.sym_size.int, (part, along), like=part, origin=NAME, val=_value(part).shape[along])
        update(new, role="batch")
        return new


def _keep_role(node: Node) -> None:
    roles = {info(a).role for a in node.all_input_nodes if a.op != "placeholder"}
    if roles <= {"batch", ""} and all(a.op != "get_attr" for a in node.all_input_nodes):
        update(node, role="batch")


def _symbolic_dims(node: Node) -> list[int]:
    """Dimensions of a call's tensors that are no constants."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if node.op != "call_function" or not isinstance(first, torch.Tensor):
        return []
    return [d for d, size in enumerate(first.shape) if isinstance(size, torch.SymInt)]


def _joins(node: Node, dim: int) -> bool:
    """Whether a node joins several runs of rows."""
    if _name(node) != "cat" or _along(node) != dim:
        return False
    listed: Any = node.args[0]
    return sum(isinstance(_value(part).shape[-1 if _is_empty(part) else dim], torch.SymInt) for part in listed) > 0


def _value(node: Node) -> torch.Tensor:
    value: Any = node.meta["val"]
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return first


def _mode(node: Node) -> Any:
    return _value(node).fake_mode  # type: ignore[attr-defined]


def _name(node: Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return node.target._schema.name.partition("::")[2]


def _along(node: Node) -> int:
    return int(argument(node, "dim", 0)) % _value(node).ndim


def _is_empty(node: Node) -> bool:
    return tuple(_value(node).shape) == (0,)


def _expression(value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, Node):
        value = value.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _is_behind(place: Any) -> bool:
    """Whether a place counts from the end: a negative number, or minus a size."""
    if isinstance(place, int):
        return place < 0
    return bool(getattr(place, "could_extract_minus_sign", bool)())


def _equal(a: Any, b: Any) -> bool:
    difference = a - b
    expand = getattr(difference, "expand", None)
    return bool((expand() if expand else difference) == 0)


def _pointwise(node: Node, dim: int) -> Operands:
    """Operands that have the rows; those of size 1 there are read by every part."""
    found: Operands = {}
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        at = dim - _value(node).ndim + value.ndim
        if at >= 0 and not (isinstance(value.shape[at], int) and value.shape[at] == 1):
            found[operand] = at
    return found


def _same(node: Node, dim: int) -> Operands:
    """Every tensor operand has the rows in the same place."""
    return {a: dim for a in node.all_input_nodes if not isinstance(a.meta.get("val"), torch.SymInt)}


def _not_along(node: Node, dim: int) -> Operands | None:
    """Like `_same`, for operators that must not run along the rows."""
    return None if _along(node) == dim else _same(node, dim)


def _first(node: Node, dim: int) -> Operands | None:
    """Only the first operand has rows, not in its last dimension."""
    source: Any = node.args[0]
    return None if dim == rank(source) - 1 else {source: dim}


def _moved(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    for d in range(rank(source)):
        seen = {source: Placement(Kind.ROWS, d)}
        if transpose_rule(node, seen, None) == dim:  # type: ignore[arg-type]
            return {source: d}
    return None


def _unsqueezed(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    at = int(node.args[1]) % _value(node).ndim  # type: ignore[call-overload]
    return None if at == dim else {source: dim - (at < dim)}


def _viewed(node: Node, dim: int) -> Operands | None:
    """A view that leaves the row dimension as it is, and all that lies before it together."""
    source: Any = node.args[0]
    shape, old = _value(node).shape, _value(source).shape
    others = [s for d, s in enumerate(shape) if d != dim]
    if any(isinstance(s, torch.SymInt) for s in others):
        return None
    for d, size in enumerate(old):
        if str(size) == str(shape[dim]) and product(old[:d]) == product(shape[:dim]):
            return {source: d}
    return None


def _expanded(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    others = [s for d, s in enumerate(_value(node).shape) if d != dim]
    at = dim - _value(node).ndim + rank(source)
    return None if at < 0 or any(isinstance(s, torch.SymInt) for s in others) else {source: at}


def _reduced(node: Node, dim: int) -> Operands | None:
    """A reduction over other dimensions that keeps them."""
    source: Any = node.args[0]
    dims: Any = argument(node, "dim")
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    kept = bool(argument(node, "keepdim", False))
    if not listed or not kept or dim in [d % rank(source) for d in listed]:
        return None
    return {source: dim}


def _multiplied(node: Node, dim: int) -> Operands | None:
    """A product of matrices of equal rank, along the first's rows or the second's columns."""
    a, b = node.args[:2]
    if not isinstance(a, Node) or not isinstance(b, Node) or rank(a) != rank(b):
        return None
    last = rank(a) - 1
    return {b: last} if dim == last else {a: dim} if dim == last - 1 else None


def _looked_up(node: Node, dim: int) -> Operands | None:
    ids: Any = node.args[1]
    return {ids: dim} if dim < rank(ids) else None


def _indexed(node: Node, dim: int) -> Operands | None:
    """``table[ids]``."""
    listed: Any = node.args[1]
    if len(listed) != 1 or not isinstance(listed[0], Node):
        return None
    return {listed[0]: dim} if dim < rank(listed[0]) else None


def _repeated(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    along = argument(node, "dim")
    return None if along is None or int(along) % rank(source) == dim else {source: dim}


Rule = Callable[[Node, int], Operands | None]


def _table() -> dict[str, Rule]:
    groups: Sequence[tuple[Rule, str]] = (
        (_same, "to _to_copy clone contiguous detach alias type_as"),
        (_not_along, "cat slice split chunk split_with_sizes softmax _softmax narrow"),
        (_first, "linear rms_norm layer_norm"),
        (_moved, "transpose permute t"),
        (_unsqueezed, "unsqueeze"),
        (_viewed, "view reshape _unsafe_view"),
        (_expanded, "expand"),
        (_reduced, "mean sum amax amin linalg_vector_norm"),
        (_multiplied, "matmul bmm"),
        (_looked_up, "embedding"),
        (_indexed, "index"),
        (_repeated, "repeat_interleave"),
    )
    return {name: rule for rule, names in groups for name in names.split()}


RULES = _table()

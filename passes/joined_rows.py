"""Values whose row dimension holds several runs of rows, taken apart: ``f(cat(a, b))`` is ``cat(f(a), f(b))``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.joined_rules import along, operands_with_rows, operator_name, tensor
from spec_compile.analysis.row_rules import Refusal, argument
from spec_compile.analysis.sizes import Rows
from spec_compile.ir.edit import call
from spec_compile.ir.meta import info, update

aten = torch.ops.aten
NAME = "RecogniseAttention"


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

    def follow(self, node: Node, dim: int) -> None:
        """Take a node that was made since into account."""
        if self._is_apart(node, dim):
            self.apart.add((node, dim))

    def slices(self) -> list[tuple[Node, list[Node]]]:
        """Slices of joined rows, with the parts that each takes."""
        found = []
        for node, dim in self.apart:
            source = node.args[0] if node.args else None
            cut = (
                operator_name(node) == "slice"
                and along(node) == dim
                and (source, dim) in self.apart
            )
            if cut and node.users:
                found.append((node, self.parts(node, dim)))
        return found

    def is_joined(self, node: Node, dim: int) -> bool:
        """Whether a dimension's size is neither a constant nor a multiple of T or A alone."""
        return self.sizes.multiple(tensor(node).shape[dim]) < 0

    def _is_apart(self, node: Node, dim: int) -> bool:
        if _joins(node, dim):
            return True
        if operator_name(node) == "slice" and along(node) == dim:
            return (node.args[0], dim) in self.apart
        operands = operands_with_rows(node, dim) or {}
        return any((a, d) in self.apart for a, d in operands.items())

    def _parts(self, node: Node, dim: int) -> list[Node]:
        if _joins(node, dim):
            listed: Any = node.args[0]
            joined = [part for part in listed if not _is_empty(part)]
            return [part for source in joined for part in self.parts(source, dim)]
        if operator_name(node) == "slice" and along(node) == dim:
            return self._cut(node, dim)
        operands = operands_with_rows(node, dim) or {}
        split = {a: self.parts(a, d) for a, d in operands.items()}
        lengths = [[self._size(p, operands[a]) for p in parts] for a, parts in split.items()]
        if any(other != lengths[0] for other in lengths):
            raise Refusal(f"combines rows in {node.name} that were joined differently")
        count = len(lengths[0])
        return [self._apply(node, dim, {a: p[i] for a, p in split.items()}) for i in range(count)]

    def _size(self, node: Node, dim: int) -> Any:
        size = tensor(node).shape[dim]
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

    def _apply(self, node: Node, dim: int, given: dict[Node, Node]) -> Node:
        """The operator on one part of each operand."""
        args: Any = torch.fx.map_arg(node.args, lambda n: given.get(n, n))
        kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: given.get(n, n))
        with self.graph.inserting_before(node):
            if operator_name(node) in ("view", "reshape", "_unsafe_view", "expand"):
                size = self._length(next(iter(given.values())), node, dim, given)
                shape = [size if d == dim else int(s) for d, s in enumerate(tensor(node).shape)]
                args = (args[0], shape)
            fake: Any = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            with tensor(node).fake_mode:  # type: ignore[attr-defined]
                val = node.target(*fake[0], **fake[1])  # type: ignore[operator]
            new = call(
                self.graph, node.target, args, like=node, origin=NAME, kwargs=kwargs, val=val
            )
        _keep_role(new)
        return new

    def _length(self, part: Node, node: Node, dim: int, given: dict[Node, Node]) -> Node:
        """Number of rows of a part, as a node."""
        source = next(iter(given))
        along = (operands_with_rows(node, dim) or {})[source]
        new = call(
            self.graph,
            aten.sym_size.int,
            (part, along),
            like=part,
            origin=NAME,
            val=tensor(part).shape[along],
        )
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
    if operator_name(node) != "cat" or along(node) != dim:
        return False
    listed: Any = node.args[0]
    return (
        sum(
            isinstance(tensor(part).shape[-1 if _is_empty(part) else dim], torch.SymInt)
            for part in listed
        )
        > 0
    )


def _is_empty(node: Node) -> bool:
    return tuple(tensor(node).shape) == (0,)


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

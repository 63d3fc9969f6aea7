"""Values whose row dimension holds several runs of rows, taken apart: ``f(cat(a, b))`` is ``cat(f(a), f(b))``."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.joined_rules import operands_with_rows, operator_name, tensor
from spec_compile.analysis.row_joins import (
    cut_of,
    is_uniform,
    joined_by_cat,
    merged_runs,
    repeated_rows,
)
from spec_compile.analysis.row_rules import Refusal, rank
from spec_compile.analysis.sizes import Rows, product
from spec_compile.ir.edit import call
from spec_compile.ir.meta import info, update

aten = torch.ops.aten
ATTENTION = (aten.scaled_dot_product_attention.default,)
RESHAPES = ("view", "reshape", "_unsafe_view", "expand")
Place = tuple[Node, int]
"""A value, and one of its dimensions."""


class MixedRows(Refusal):
    """A length is none of a run's, and nothing tells where it was joined."""


class JoinedRows:
    """Take values apart along a dimension, back to where their rows were joined."""

    def __init__(self, gm: GraphModule, origin: str) -> None:
        """Find what is joined.

        Args:
            gm: the graph.
            origin: name of the pass that nodes are made for.
        """
        self.graph, self.origin = gm.graph, origin
        self.sizes = Rows(gm.graph)
        self.frames = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
        self.known: dict[Place, list[Node]] = {}
        self.apart: dict[Place, None] = {}
        """Values and dimensions along which rows were joined."""
        for node in gm.graph.nodes:
            for dim in _symbolic_dims(node) if info(node).role != "target" else ():
                self.follow(node, dim)

    def follow(self, node: Node, dim: int) -> None:
        """Take a node that was made since into account."""
        if self._is_apart(node, dim):
            self.apart[node, dim] = None

    def parts(self, node: Node, dim: int) -> list[Node]:
        """Values that, joined along ``dim``, are the node's; each has rows of one kind.

        Raises:
            Refusal: an operator in between mixes rows, or is not known.
        """
        if (node, dim) not in self.apart:
            if self.is_mixed(node, dim):
                raise MixedRows(
                    f"has rows of several kinds that {node.target} ({node.name}) joins; join rows with torch.cat, and "
                    "use operators on them that act on each row alone"
                )
            return [node]
        if (node, dim) not in self.known:
            self.known[node, dim] = self._parts(node, dim)
        return self.known[node, dim]

    def dims(self, node: Node) -> list[int]:
        """Dimensions of a value along which rows were joined."""
        return [d for d in _symbolic_dims(node) if (node, d) in self.apart]

    def runs(self, node: Node, dim: int, at: Node) -> list[Node]:
        """The same for ``at``, where equal rows are one run for each time that they are repeated."""
        found = []
        for part in self.parts(node, dim):
            size = tensor(part).shape[dim]
            several = self.sizes.multiple(size) if not self.sizes.anchored(size) else 1
            found += self._refined(
                part, dim, [(self.frames["index"], 0)] * several, at, or_whole=True
            )
        return found

    def runs_alike(self, nodes: Sequence[Node], at: Node) -> list[list[Node]]:
        """The runs of several [.., rows, head_dim] for ``at``, all as fine as the finest where they can be."""
        found = [self.runs(node, rank(node) - 2, at) for node in nodes]
        finest = [(run, rank(run) - 2) for run in max(found, key=len)]
        for i, runs in enumerate(found):
            with contextlib.suppress(Refusal):
                found[i] = self._aligned(runs, rank(nodes[i]) - 2, finest, at)
        return found

    def is_mixed(self, node: Node, dim: int) -> bool:
        """Whether a dimension's size is neither a constant nor a multiple of T or A alone."""
        return self.sizes.multiple(tensor(node).shape[dim]) < 0

    def apply(
        self, node: Node, dim: int, given: dict[Node, Node], like: Place, at: Node | None = None
    ) -> Node:
        """Do a node's operator on one part of each operand.

        Args:
            node: the operator on all parts.
            dim: its row dimension.
            given: operands, and a part of each.
            like: a value, and a dimension in which it has as many rows as the result.
            at: where the new node is put; None: in front of the old one.
        """
        args: Any = torch.fx.map_arg(node.args, lambda n: given.get(n, n))
        kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: given.get(n, n))
        with self.graph.inserting_before(at or node):
            if operator_name(node) in RESHAPES and not isinstance(args[1], torch.dtype):
                args = (args[0], self._shape(tensor(node).shape, dim, like))
            elif not given and is_uniform(node, dim):
                args = (self._shape(tensor(node).shape, dim, like), *args[1:])
            return self._call(node.target, args, node, kwargs)

    def _shape(self, shape: Sequence[Any], dim: int, like: Place) -> list[Any]:
        """A shape, with the length of another value at one dimension."""
        return [self._length(like) if d == dim else int(s) for d, s in enumerate(shape)]

    def _is_apart(self, node: Node, dim: int) -> bool:
        if joined_by_cat(node, dim) or repeated_rows(node, dim) or merged_runs(node, dim):
            return True
        if node.target in ATTENTION and dim == rank(node) - 2:
            return (node.args[0], dim) in self.apart
        cut = cut_of(node, dim)
        if cut is not None:
            return (cut.source, dim) in self.apart
        operands = operands_with_rows(node, dim) or {}
        return any(place in self.apart for place in operands.items())

    def _parts(self, node: Node, dim: int) -> list[Node]:
        if joined := joined_by_cat(node, dim):
            return [part for source in joined for part in self.parts(source, dim)]
        if repeated := repeated_rows(node, dim):
            return self.parts(repeated[0], dim) * repeated[1]
        if merged := merged_runs(node, dim):
            return self._merged_parts(node, dim, *merged)
        if cut_of(node, dim) is not None:
            return self._cut(node, dim)
        operands = operands_with_rows(node, dim) or {}
        if not operands:
            raise Refusal(
                f"reads joined rows, which {node.target} ({node.name}) does not keep apart"
            )
        split = {a: self.parts(a, d) for a, d in operands.items()}
        first = max(split, key=lambda a: len(split[a]))
        like = [(part, operands[first]) for part in split[first]]
        aligned = {a: self._aligned(split[a], d, like, node) for a, d in operands.items()}
        return [
            self.apply(node, dim, {a: p[i] for a, p in aligned.items()}, place)
            for i, place in enumerate(like)
        ]

    def _aligned(
        self, parts: list[Node], dim: int, like: Sequence[Place], node: Node
    ) -> list[Node]:
        """Parts that are as long as others, where a longer one is the same in every row."""
        found: list[Node] = []
        rest = list(like)
        for part in parts:
            taken: list[Place] = []
            while rest and not _equal(self._total(taken), self._size(part, dim)):
                taken.append(rest.pop(0))
            if not _equal(self._total(taken), self._size(part, dim)):
                raise Refusal(f"combines rows in {node.name} that were joined differently")
            found += self._refined(part, dim, taken, node)
        if rest:
            raise Refusal(f"combines rows in {node.name} that were joined differently")
        return found

    def _refined(
        self, node: Node, dim: int, like: Sequence[Place], at: Node, *, or_whole: bool = False
    ) -> list[Node]:
        """A value that is the same in every row, cut in pieces as long as others, for a reader of them."""
        if len(like) < 2:
            return [node]
        if (node, dim) not in self.apart and is_uniform(node, dim):
            return [self.apply(node, dim, {}, place, at) for place in like]
        operands = {} if (node, dim) in self.apart else operands_with_rows(node, dim) or {}
        if not operands and not or_whole:
            raise Refusal(f"combines rows with those of {node.name}, which were joined differently")
        try:
            pieces = {a: self._refined(a, d, like, at) for a, d in operands.items()}
        except Refusal:
            if or_whole:
                return [node]
            raise
        if not pieces:
            return [node]
        return [
            self.apply(node, dim, {a: p[i] for a, p in pieces.items()}, place, at)
            for i, place in enumerate(like)
        ]

    def _merged_parts(self, node: Node, dim: int, source: Node, at: int) -> list[Node]:
        """Each of the runs that a view puts behind one another."""
        found = []
        if (source, at + 1) in self.apart:
            raise Refusal(f"has rows in {node.name} that were joined twice")
        with self.graph.inserting_before(node):
            for run in range(int(tensor(source).shape[at])):
                one = self._call(aten.select.int, (source, at, run), node, {})
                shape = self._shape(tensor(node).shape, dim, (one, at))
                found.append(self._call(aten.reshape.default, (one, shape), node, {}))
        return found

    def _cut(self, node: Node, dim: int) -> list[Node]:
        """Whole parts that a slice takes."""
        cut = cut_of(node, dim)
        assert cut is not None
        parts = self.parts(cut.source, dim)
        bounds = [self._total([(p, dim) for p in parts[:i]]) for i in range(len(parts) + 1)]
        first, last = (
            next((i for i, bound in enumerate(bounds) if _equal(bound, place)), None)
            for place in (cut.start, cut.end)
        )
        if first is None or last is None:
            raise Refusal(f"cuts joined rows elsewhere than where they were joined ({node.name})")
        return parts[first:last]

    def _size(self, node: Node, dim: int) -> Any:
        return product(tensor(node).shape[dim : dim + 1])

    def _total(self, places: Sequence[Place]) -> Any:
        return sum(self._size(*place) for place in places)

    def _length(self, like: Place) -> Node:
        """Number of rows of a part, as a node: that of the whole packed row, which is cut where rows are."""
        node, dim = like
        size = tensor(node).shape[dim]
        several = self.sizes.multiple(size)
        frame = self.frames["anchors" if self.sizes.anchored(size) else "index"]
        if several < 1:
            return self._number(aten.sym_size.int, (node, dim), size)
        one = frame.meta["val"].shape[0]
        length = self._number(aten.sym_size.int, (frame, 0), one)
        return length if several == 1 else self._number(operator.mul, (length, several), size)

    def _number(self, target: Any, args: tuple[Any, ...], val: Any) -> Node:
        new = call(self.graph, target, args, like=args[0], origin=self.origin, val=val)
        update(new, role="batch")
        return new

    def _call(self, target: Any, args: Any, like: Node, kwargs: dict[str, Any]) -> Node:
        fake: Any = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with tensor(like).fake_mode:  # type: ignore[attr-defined]
            try:
                val = target(*fake[0], **fake[1])
            # what an operator says of a part of its rows is about the operator
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                raise Refusal(
                    f"reads joined rows, which {like.target} ({like.name}) does not take apart: {first}"
                ) from error
        new = call(self.graph, target, args, like=like, origin=self.origin, kwargs=kwargs, val=val)
        _keep_role(new)
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


def _equal(a: Any, b: Any) -> bool:
    difference = a - b
    expand = getattr(difference, "expand", None)
    return bool((expand() if expand else difference) == 0)

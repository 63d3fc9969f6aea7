"""Attention around a softmax written by hand: its mask as a node, its keys and values as runs of rows."""

from __future__ import annotations

import string
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.attention_proof import Factor, Proof, inverse, measured_scale
from spec_compile.analysis.joined_rules import operator_name
from spec_compile.analysis.row_rules import Refusal, rank
from spec_compile.analysis.sizes import Rows
from spec_compile.analysis.written_softmax import MOVES, permutation, read
from spec_compile.ir.edit import ancestors, call
from spec_compile.ir.meta import info

from .declare_attention import NAME, Run
from .joined_rows import JoinedRows

aten = torch.ops.aten
PERMUTE = aten.permute.default


class WrittenAttention:
    """What `read` guesses, in the terms of `RecogniseAttention`."""

    def __init__(self, gm: GraphModule, softmax: Node, joined: JoinedRows) -> None:
        self.gm, self.graph, self.joined = gm, gm.graph, joined
        self.guess = read(softmax, Rows(gm.graph))
        self.query, self.output = self.guess.query, self.guess.output
        self.standing = self._standing()
        """The output as [..., heads, rows, head_dim]."""
        self.mask = self._without_scores()
        """What is left of the softmax's operand where all products are 0."""
        self.factors: dict[Node, Factor] = {}
        self.keys, self.own = self._runs(self.guess.scores, "keys")
        self.values, own = self._runs(self.guess.values, "node")
        if own != self.own:
            raise Refusal("has keys and values that were joined differently")

    def _standing(self) -> Node:
        order = inverse(self.guess.layout)
        if order == tuple(range(len(order))):
            return self.output
        with self.graph.inserting_after(self.output):
            return self._permuted(self.output, order)

    def in_layout(self, new: Node) -> Node:
        """A result [..., heads, rows, head_dim] as the output has it."""
        if self.standing is self.output:
            return new
        with self.graph.inserting_after(new):
            return self._permuted(new, self.guess.layout)

    def scale(self) -> float:
        """Factor on all scores."""
        products = [s.node for s in self.guess.scores]
        return measured_scale(self.gm, self.guess.logits, self.mask, products)

    def proof(self, new: Node, few: list[Run]) -> Proof:
        """What is to be run: the old result and the new one, from the same random rows."""
        leaves = [self.query, *(x for run in few for x in (run.keys, run.values))]
        return Proof(self.standing, new, tuple(dict.fromkeys(leaves)), self.factors, self.mask)

    def _runs(self, columns: Any, name: str) -> tuple[list[Node], list[bool]]:
        """Runs of rows of all columns, in order, and which of them are of the row's own."""
        runs: list[Node] = []
        own: list[bool] = []
        for column in columns:
            factor: Node = getattr(column, name)
            layout = tuple(range(rank(factor)))
            if name == "keys" and not column.own:
                layout = (*layout[:-2], layout[-1], layout[-2])
            if name == "node" and column.own:
                layout = self.guess.layout
            rows = self._in_order(factor, inverse(layout))
            parts = self.joined.parts(rows, rank(rows) - 2)
            if column.own and len(parts) > 1:
                raise Refusal("has scores of own keys that were joined of several runs")
            self.factors[factor] = Factor(tuple(parts), layout)
            runs += parts
            own += [column.own] * len(parts)
        return runs, own

    def _in_order(self, factor: Node, order: tuple[int, ...]) -> Node:
        """The rows [..., rows, head_dim] of a factor with other dimensions."""
        straight, taken, source = tuple(range(len(order))), order, factor
        found = factor if taken == straight else None
        while operator_name(source) in MOVES:  # what is only moved to and fro is taken from before
            moved = permutation(source) or ()
            taken, source = tuple(moved[d] for d in taken), source.all_input_nodes[0]
            found = source if taken == straight else found
        if found is not None:
            return found
        with self.graph.inserting_after(factor):
            new = self._permuted(factor, order)
        self.joined.follow(new, len(order) - 2)
        return new

    def _permuted(self, node: Node, order: tuple[int, ...]) -> Node:
        value = node.meta["val"]
        with value.fake_mode:
            val = value.permute(order)
        return call(self.graph, PERMUTE, (node, list(order)), like=node, origin=NAME, val=val)

    def _without_scores(self) -> Node:
        """A copy of the way from the products to the softmax, with 0 for each product."""
        products = {s.node for s in self.guess.scores}
        logits = self.guess.logits
        between = ancestors([logits], stop=products)
        copies: dict[Node, Node] = {}
        with self.graph.inserting_before(self.guess.softmax):
            for product in products:
                args = (product,)
                copies[product] = call(
                    self.graph, aten.zeros_like.default, args, like=product, origin=NAME
                )
            for node in [n for n in self.graph.nodes if n in between]:
                if any(a in copies for a in node.all_input_nodes):
                    copies[node] = self.graph.node_copy(node, lambda n: copies.get(n, n))
        return copies[logits]


def expand_einsums(gm: GraphModule) -> None:
    """``einsum`` of two factors, in drafts, becomes a product of matrices or of elements."""
    moved: dict[tuple[Node, tuple[int, ...]], Node] = {}
    for node in list(gm.graph.nodes):
        if node.target == aten.einsum.default and info(node).role == "draft":
            _Einsum(gm, node, moved).expand()


class _Einsum:
    def __init__(
        self, gm: GraphModule, node: Node, moved: dict[tuple[Node, tuple[int, ...]], Node]
    ) -> None:
        self.graph, self.node, self.moved = gm.graph, node, moved

    def expand(self) -> None:
        """Leave anything but one or no summed letter between two factors as it is."""
        equation = str(self.node.args[0]).replace(" ", "")
        operands: Any = self.node.args[1]
        left, _, out = equation.partition("->")
        letters = left.split(",")
        if len(letters) != 2 or not out or not set(equation) <= set(string.ascii_letters + ",->"):
            return
        (a, b), (x, y) = letters, operands
        summed = [c for c in a if c in b and c not in out]
        shared = [c for c in out if c in a and c in b]
        rest = [[c for c in own if c not in shared and c not in summed] for own in (a, b)]
        if any(len(set(word)) < len(word) for word in (a, b, out)) or len(summed) > 1:
            return
        with self.graph.inserting_before(self.node):
            if len(summed) == 1 and [len(r) for r in rest] == [1, 1]:
                made = self._matrices(x, y, a, b, (shared, rest, summed), out)
            elif (not rest[1] and not summed) or (len(summed) == 1 and not any(rest)):
                made = self._elements(x, y, a, b, summed, out)
            else:
                return
        self.node.replace_all_uses_with(made)
        self.graph.erase_node(self.node)

    def _matrices(self, x: Node, y: Node, a: str, b: str, sets: Any, out: str) -> Node:
        shared, (mine, other), summed = sets
        first = self._permuted(x, a, [*shared, *mine, *summed])
        second = self._permuted(y, b, [*shared, *summed, *other])
        product = self._call(aten.matmul.default, (first, second))
        return self._permuted(product, "".join([*shared, *mine, *other]), list(out))

    def _elements(self, x: Node, y: Node, a: str, b: str, summed: list[str], out: str) -> Node:
        order = [*out, *summed]
        factors = []
        for node, own in ((x, a), (y, b)):
            node = self._permuted(node, own, [c for c in order if c in own])
            for at, c in enumerate(order):
                if c not in own:
                    node = self._call(aten.unsqueeze.default, (node, at))
            factors.append(node)
        made = self._call(aten.mul.Tensor, tuple(factors))
        return self._call(aten.sum.dim_IntList, (made, [-1])) if summed else made

    def _permuted(self, node: Node, have: str, want: list[str]) -> Node:
        order = [have.index(c) for c in want]
        if order == sorted(order):
            return node
        key = (node, tuple(order))
        if key not in self.moved:  # so that equal queries are one node
            last = len(order) - 1
            turned = [*order[:-2], order[-1], order[-2]] == sorted(order)
            target, args = (aten.transpose.int, (last - 1, last)) if turned else (PERMUTE, (order,))
            self.moved[key] = self._call(target, (node, *args))
        return self.moved[key]

    def _call(self, target: Any, args: tuple[Any, ...]) -> Node:
        fake: Any = torch.fx.map_arg(args, lambda n: n.meta["val"])
        with self.node.meta["val"].fake_mode:
            val = target(*fake)
        return call(self.graph, target, args, like=self.node, origin=NAME, val=val)

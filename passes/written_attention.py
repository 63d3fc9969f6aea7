"""Attention around a softmax written by hand: its mask as a node, its keys and values as runs of rows."""

from __future__ import annotations

import string
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.attention_proof import Proof, measured_scale
from spec_compile.analysis.joined_rules import operator_name
from spec_compile.analysis.row_rules import Refusal, rank
from spec_compile.analysis.sizes import Rows
from spec_compile.analysis.written_softmax import read
from spec_compile.ir.edit import ancestors, call
from spec_compile.ir.meta import info

from .declare_attention import NAME, Run
from .joined_rows import JoinedRows

aten = torch.ops.aten


class WrittenAttention:
    """What `read` guesses, in the terms of `RecogniseAttention`."""

    def __init__(self, gm: GraphModule, softmax: Node, joined: JoinedRows) -> None:
        self.gm, self.graph, self.joined = gm, gm.graph, joined
        self.guess = read(softmax, Rows(gm.graph))
        self.query, self.output = self.guess.query, self.guess.output
        self.mask = self._without_scores()
        """What is left of the softmax's operand where all products are 0."""
        self.pieces: dict[Node, list[Node]] = {}
        """The runs that a factor of a product is joined of, [..., rows, head_dim]."""
        self.keys, self.own = self._runs(self.guess.scores, "keys")
        self.values, own = self._runs(self.guess.values, "node")
        if own != self.own:
            raise Refusal("has keys and values that were joined differently")

    def scale(self) -> float:
        """Factor on all scores."""
        products = [s.node for s in self.guess.scores]
        return measured_scale(self.gm, self.guess.logits, self.mask, products)

    def proof(self, new: Node, few: list[Run]) -> Proof:
        """What is to be run: the old result and the new one, from the same random rows."""
        leaves = [self.query, *(x for run in few for x in (run.keys, run.values))]
        joined = {source: tuple(parts) for source, parts in self.pieces.items()}
        return Proof(self.output, new, tuple(dict.fromkeys(leaves)), joined, self.mask)

    def _runs(self, columns: Any, name: str) -> tuple[list[Node], list[bool]]:
        """Runs of rows of all columns, in order, and which of them are of the row's own."""
        runs: list[Node] = []
        own: list[bool] = []
        for column in columns:
            factor: Node = getattr(column, name)
            turned = name == "keys" and not column.own
            rows = self._turned(factor) if turned else factor
            parts = [rows] if column.own else self.joined.parts(rows, rank(rows) - 2)
            self.pieces[rows] = parts
            if rows is not factor:
                self.pieces[factor] = parts
            runs += parts
            own += [column.own] * len(parts)
        return runs, own

    def _turned(self, factor: Node) -> Node:
        """The rows [..., rows, head_dim] of a factor [..., head_dim, rows]."""
        last = rank(factor) - 1
        source: Any = factor.args[0] if factor.args else None
        if operator_name(factor) == "transpose":
            dims = sorted(int(d) % (last + 1) for d in factor.args[1:3])  # type: ignore[arg-type]
            if dims == [last - 1, last]:
                return source  # type: ignore[no-any-return]
        with self.graph.inserting_after(factor):
            value = factor.meta["val"]
            with value.fake_mode:
                val = value.transpose(-2, -1)
            new = call(
                self.graph, aten.transpose.int, (factor, last - 1, last), like=factor, origin=NAME, val=val
            )
        self.joined.follow(new, last - 1)
        return new

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
    for node in list(gm.graph.nodes):
        if node.target == aten.einsum.default and info(node).role == "draft":
            _Einsum(gm, node).expand()


class _Einsum:
    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.graph, self.node = gm.graph, node

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
            elif not rest[1] and not summed or (len(summed) == 1 and not any(rest)):
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
        if [*order[:-2], order[-1], order[-2]] == sorted(order):
            return self._call(aten.transpose.int, (node, len(order) - 2, len(order) - 1))
        return self._call(aten.permute.default, (node, order))

    def _call(self, target: Any, args: tuple[Any, ...]) -> Node:
        fake: Any = torch.fx.map_arg(args, lambda n: n.meta["val"])
        with self.node.meta["val"].fake_mode:
            val = target(*fake)
        return call(self.graph, target, args, like=self.node, origin=NAME, val=val)

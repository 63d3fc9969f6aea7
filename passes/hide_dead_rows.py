"""Keep dead rows out of what a draft computes: the rows added so that every rank has as many."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.row_rules import argument, has_rows
from spec_compile.analysis.rule_table import sums_over_rows
from spec_compile.analysis.sizes import Rows, number_arguments
from spec_compile.ir.edit import call
from spec_compile.ir.meta import NodeInfo, info, update
from spec_compile.ir.placement import Kind, full, replicated

from .base import Cap, PassResult

aten = torch.ops.aten
NAME = "HideDeadRows"
ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
NO_REDUCTION = 0
"""Of a loss operator."""


@dataclass(frozen=True, slots=True)
class HideDeadRows:
    """``x.sum(0) / T`` becomes ``where(index < live_rows, x, 0).sum(0) / live_rows``; sizes stay."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.LOCAL})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.LIVE})

    def __call__(self, gm: GraphModule) -> PassResult:
        hider = _Hider(gm)
        for node in list(gm.graph.nodes):
            hider.visit(node)
        return PassResult(gm, hider.changes)


class _Hider:
    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.sizes = Rows(gm.graph)
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.index = next(n for n in places if n.target == "index")
        with self.graph.inserting_after(places[-1]):
            self.live_rows = self.graph.placeholder("live_rows")
        self.live_rows.meta["val"] = self.index.meta["val"].shape[0]
        self.live_rows.meta["spec"] = NodeInfo(placement=replicated(batch=True), origin=NAME)
        readers = list(self.index.users)
        with self.graph.inserting_after(self.live_rows):
            alive = self._call(
                aten.lt.Scalar, (self.index, self.live_rows), self.index.meta["val"] < 1
            )
        self.alive: dict[tuple[int, int], Node] = {(1, 0): alive}
        self.numbers: dict[Node, Node] = {self.live_rows: self.live_rows}
        self.changes = 0
        if readers:  # rows past the last would be out of bounds of what has T entries
            self._replace(self.index, 0, readers)

    def visit(self, node: Node) -> None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return
        for position in number_arguments(node):
            self._use_live_number(node, position)
        placement = info(node).placement
        if placement is None or placement.anchored:
            return  # unused anchors are the draft's own business
        if node.target in ARANGES and has_rows(placement):
            self._replace(node, argument(node, "start", 0), list(node.users))
        elif sums_over_rows(node):
            self._sum_live_rows(node)

    def _call(self, target: Any, args: tuple[Any, ...], val: Any) -> Node:
        """A value of whole rows made from `index`."""
        node = call(self.graph, target, args, like=self.index, origin=NAME, val=val)
        update(node, role="batch", placement=full(0))
        return node

    def _replace(self, node: Node, filler: Any, readers: list[Node]) -> None:
        """Give ``readers`` another value at dead rows: one that is live rows' too."""
        alive = self.alive[1, 0]  # right behind the inputs
        with self.graph.inserting_after(alive if node is self.index else node):
            args = (alive, node, filler)
            new = call(self.graph, aten.where.ScalarOther, args, like=node, origin=NAME)
        update(new, role="batch")
        for reader in readers:
            reader.replace_input_with(node, new)
        self.changes += 1

    def _sum_live_rows(self, node: Node) -> None:
        """Sum ``where(alive, x, 0)``: a product with 0 would keep inf and nan, in the gradient too."""
        assert isinstance(node.target, torch._ops.OpOverload)
        names = [a.name for a in node.target._schema.arguments]
        if any((p := info(a).placement) and p.anchored for a in node.all_input_nodes):
            return
        if "reduction" in names:
            self._sum_elementwise_loss(node, names)
            return
        source = next(a for a in node.all_input_nodes if (p := info(a).placement) and has_rows(p))
        with self.graph.inserting_before(node):
            node.replace_input_with(source, self._only_live(source))

    def _sum_elementwise_loss(self, node: Node, names: list[str]) -> None:
        target: Any = node.target
        at = names.index("reduction")
        args = [argument(node, name) for name in names[:at]]
        rest = {k: v for k, v in node.kwargs.items() if k not in names[: at + 1]}
        args += [NO_REDUCTION, *node.args[at + 1 :]]
        given = torch.fx.map_arg((tuple(args), rest), lambda n: n.meta["val"])
        with node.meta["val"].fake_mode:
            val = target(*given[0], **given[1])
        places = [p for a in node.all_input_nodes if (p := info(a).placement) and has_rows(p)]
        rows = next((p for p in places if p.kind == Kind.ROWS), places[0])
        with self.graph.inserting_before(node):
            each = call(
                self.graph, node.target, args, like=node, origin=NAME, val=val, kwargs=rest,
                placement=rows,
            )  # fmt: skip
            kept = self._only_live(each)
            new = call(self.graph, aten.sum.default, (kept,), like=node, origin=info(node).origin)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _only_live(self, x: Node) -> Node:
        placement, value = info(x).placement, x.meta["val"]
        assert placement is not None
        after = value.ndim - 1 - placement.dim
        alive = self._alive(self.sizes.multiple(value.shape[placement.dim]), after)
        self.changes += 1
        if value.dtype == torch.bool:
            return call(self.graph, aten.logical_and.default, (alive, x), like=x, origin=NAME)
        return call(self.graph, aten.where.ScalarOther, (alive, x, 0), like=x, origin=NAME)

    def _alive(self, each: int, after: int) -> Node:
        """True at live rows: ``each`` entries a row, and ``after`` dimensions of size 1 behind."""
        if (each, after) not in self.alive:
            node = self._alive(1, 0) if after == 0 else self._alive(each, 0)
            value = node.meta["val"]
            with self.graph.inserting_after(node):
                if after:
                    shape = (-1, *[1] * after)
                    new = self._call(aten.view.default, (node, list(shape)), value.view(shape))
                else:
                    many = value.repeat_interleave(each)
                    new = self._call(aten.repeat_interleave.self_int, (node, each), many)
            self.alive[each, after] = new
        return self.alive[each, after]

    def _use_live_number(self, node: Node, position: int | str) -> None:
        value = node.kwargs[position] if isinstance(position, str) else node.args[position]
        live = torch.fx.map_arg(value, self._live_number)
        if isinstance(position, str):
            node.update_kwarg(position, live)
        else:
            node.update_arg(position, live)

    def _live_number(self, node: Node) -> Node:
        """The same arithmetic on the live number of rows."""
        if not self.sizes.depends(node):
            return node
        if node not in self.numbers:
            self.numbers[node] = self._made_of_live_rows(node)
            self.changes += 1
        return self.numbers[node]

    def _made_of_live_rows(self, node: Node) -> Node:
        target: Any
        args: Any
        if isinstance(node.target, torch._ops.OpOverload):  # sym_size, sym_numel
            multiple = self.sizes.multiple(node.meta["val"])
            if multiple == 1:
                return self.live_rows
            target, args = operator.mul, (self.live_rows, multiple)
        else:
            target, args = node.target, torch.fx.map_arg(node.args, self._live_number)
        with self.graph.inserting_after(node):
            return call(self.graph, target, args, like=node, origin=NAME, kwargs=dict(node.kwargs))

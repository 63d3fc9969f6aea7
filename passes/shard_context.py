"""Cut the packed row: whole ids and masks become own rows where they meet activations."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.anchor_gathers import gathered, is_row_gather
from spec_compile.analysis.locality import Locality, analyse
from spec_compile.analysis.row_by_row import is_full, is_row_by_row
from spec_compile.analysis.sizes import Rows
from spec_compile.ir.edit import call
from spec_compile.ir.facts import set_facts
from spec_compile.ir.meta import NodeInfo, info, update
from spec_compile.ir.placement import PARTIAL, Kind, Placement, full, replicated, rows

from .base import Cap, PassResult

ops = torch.ops.spec_compile
aten = torch.ops.aten
NAME = "ShardContext"
FABRIC = "cp"
ANCHORS = Placement(Kind.FULL, 0, batch=True, anchored=True)
SHAPED = (
    "view",
    "reshape",
    "expand",
    "unflatten",
    "_unsafe_view",
    "repeat",
    "tile",
    "broadcast_to",
)
FIRST_SUM = 2
"""Outputs before this one are rows; from here on they are sums."""


@dataclass(frozen=True, slots=True)
class ShardContext:
    """``f(ids_full, x_rows)`` becomes ``f(shard_rows(ids_full, slots), x_rows)``; shifts exchange halos."""

    cp: int
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.LIVE})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.SHARDED})

    def __call__(self, gm: GraphModule) -> PassResult:
        slots = _add_slots(gm)
        set_facts(gm, cp=self.cp)
        changes = 1
        if self.cp > 1:
            locality = analyse(gm.graph, lambda node: True)
            rewriter = _Rewriter(gm, slots, locality)
            for node in list(gm.graph.nodes):
                rewriter.visit(node)
            rewriter.finish(self.cp)
            gm.graph.eliminate_dead_code()  # whole values of which only own rows are read
            changes = rewriter.changes
        # shifts and gathers of ids come last: what their readers cut was found by the node that was there before
        for node in list(gm.graph.nodes):
            changes += _lower_shift(gm, node, slots[0]) + _lower_gather(gm, node, slots)
        return PassResult(gm, changes)


def _add_slots(gm: GraphModule) -> tuple[Node, Node | None]:
    """Inputs that say which rank owns which rows of the packed row, and which anchors."""
    places = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
    last = next(reversed(places.values()))
    with gm.graph.inserting_after(last):  # the one made first ends up last
        slots = gm.graph.placeholder("slots")
        anchor_slots = gm.graph.placeholder("anchor_slots") if "anchors" in places else None
    slots.meta.update(places["index"].meta)
    slots.meta["spec"] = NodeInfo(placement=full(0), origin=NAME)
    if anchor_slots is not None:
        anchor_slots.meta.update(places["anchors"].meta)
        anchor_slots.meta["spec"] = NodeInfo(placement=ANCHORS, origin=NAME)
    return slots, anchor_slots


def _lower_gather(gm: GraphModule, node: Node, slots: tuple[Node, Node | None]) -> int:
    """A gather at anchors becomes `anchored_rows` of activations, `anchored_whole` of ids; both among live rows."""
    placement = info(node).placement
    places = {a: p for a in node.all_input_nodes if (p := info(a).placement) is not None}
    if placement is None or not is_row_gather(node, places):
        return 0
    source, index = gathered(node) or (node, node)
    live_rows = next(n for n in gm.graph.nodes if n.target == "live_rows")
    target: Any = ops.anchored_whole.default
    args: tuple[Any, ...] = (source, index, live_rows)
    if placement.kind == Kind.ROWS:
        target, args = ops.anchored_rows.default, (*args, *slots, FABRIC)
    with gm.graph.inserting_before(node):
        new = call(gm.graph, target, args, like=node, origin=NAME)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return 1


def _lower_shift(gm: GraphModule, node: Node, slots: Node) -> int:
    """A shift of activations becomes `shift_rows`, one of ids `shift_whole`; both among live rows."""
    placement = info(node).placement
    if node.target != ops.shift.default or placement is None:
        return 0
    x, k, document = node.args
    live_rows = next(n for n in gm.graph.nodes if n.target == "live_rows")
    target: Any = ops.shift_whole.default
    args: tuple[Any, ...] = (x, k, document, live_rows)
    if placement.kind == Kind.ROWS:
        target, args = ops.shift_rows.default, (x, k, document, slots, live_rows, FABRIC)
    with gm.graph.inserting_before(node):
        new = call(gm.graph, target, args, like=node, origin=NAME)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return 1


class _Rewriter:
    def __init__(
        self, gm: GraphModule, slots: tuple[Node, Node | None], locality: Locality
    ) -> None:
        self.gm, self.graph, self.slots, self.locality = gm, gm.graph, slots, locality
        self.frames: dict[bool, tuple[Node, Any]] = {}
        """For rows (False) and anchors (True): whole numbers of them, and the slots that place them."""
        self.sizes = Rows(gm.graph)
        self.cut: dict[Node, Node] = {}
        self.summed: dict[Node, Node] = {}
        self.local_sizes: dict[Node, Node] = {}
        self.changes = 0
        for node in gm.graph.nodes:
            if node.op == "placeholder" and node.target in ("index", "anchors"):
                anchored = node.target == "anchors"
                self.frames[anchored] = (node, slots[anchored])

    def visit(self, node: Node) -> None:
        for source in list(node.all_input_nodes):
            if (node, source) in self.locality.cuts:
                self._cut_argument(node, source)
            if (node, source) in self.locality.sums:
                node.replace_input_with(source, self._sum(source))
        placement = info(node).placement
        if placement is None or node.op != "call_function":
            return
        if node.target == ops.shift.default and placement.kind == Kind.ROWS:
            self.changes += _lower_shift(self.gm, node, self.slots[0])
        elif (
            placement.kind == Kind.ROWS
            and isinstance(node.target, torch._ops.OpOverload)
            and node.target._schema.name.split("::")[1] in SHAPED
        ):
            node.args = torch.fx.map_arg(node.args, self._localise(node))

    def _cut_argument(self, node: Node, source: Node) -> None:
        found = gathered(node) if is_row_gather(node, self.locality.placements) else None
        cut = self._shard(source)
        if found is not None:  # the index stays whole
            node.args = (cut if found[0] is source else found[0], *node.args[1:])
        elif node.target == ops.branch_attention.default:  # k_document stays whole
            names = [a.name for a in node.target._schema.arguments]
            keep = names.index("k_document")
            node.args = tuple(
                a if i == keep else torch.fx.map_arg(a, lambda n: cut if n is source else n)
                for i, a in enumerate(node.args)
            )
        else:
            node.replace_input_with(source, cut)

    def _shard(self, source: Node) -> Node:
        if source not in self.cut:
            placement = info(source).placement
            assert placement is not None
            at = self.slots[0] if source.op == "placeholder" else source
            early = is_row_by_row(source, self.sizes)
            args = torch.fx.map_arg(source.args, self._early) if early else source.args
            with self.graph.inserting_before(at.next):
                if early:
                    own = replace(rows(placement.dim), anchored=placement.anchored)
                    new = call(
                        self.graph, source.target, args, like=source, origin=NAME, placement=own,
                        kwargs=dict(source.kwargs),
                    )  # fmt: skip
                else:
                    new = self._take_rows(source, placement.dim)
            update(new, role="batch")
            self.cut[source] = new
            self.changes += 1
        return self.cut[source]

    def _early(self, source: Node) -> Node:
        return self._shard(source) if is_full(source) else source

    def _take_rows(self, source: Node, dim: int) -> Node:
        """Own rows of a whole value; several entries a row are set apart before and joined after."""
        value = source.meta["val"]
        size = value.shape[dim]
        each, anchored = self.sizes.multiple(size), self.sizes.anchored(size)
        numbers, slots = self.frames[anchored]
        placement = replace(rows(dim), anchored=anchored)

        def made(target: Any, *args: Any, val: Any = None) -> Node:
            return call(
                self.graph, target, args, like=source, origin=NAME, placement=placement, val=val
            )

        if each == 1:
            return made(ops.shard_rows.default, source, slots, dim, FABRIC)
        length = numbers.meta["val"].shape[0]
        apart = value.reshape(*value.shape[:dim], length, each, *value.shape[dim + 1 :])
        whole = made(aten.unflatten.int, source, dim, [-1, each], val=apart)
        update(whole, placement=info(source).placement)
        own = made(ops.shard_rows.default, whole, slots, dim, FABRIC, val=apart)
        return made(aten.flatten.using_ints, own, dim, dim + 1)

    def _sum(self, source: Node) -> Node:
        if source not in self.summed:
            with self.graph.inserting_after(source):
                self.summed[source] = call(
                    self.graph,
                    ops.sum_rows.default,
                    (source, FABRIC),
                    like=source,
                    origin=NAME,
                    placement=replicated(batch=False),
                )
            self.changes += 1
        return self.summed[source]

    def _localise(self, user: Node) -> Any:
        def change(value: Node) -> Node:
            known = self.sizes.depends(value) or self.sizes.depends_on_anchors(value)
            if isinstance(value.meta.get("val"), torch.SymInt) and known:
                return self._local_size(value)
            return value

        return change

    def _local_size(self, value: Node) -> Node:
        """The same arithmetic on this rank's number of rows."""
        if value in self.local_sizes:
            return self.local_sizes[value]
        if value.target == aten.sym_size.int:
            base = self._shard(self.frames[self.sizes.anchored(value.meta["val"])][0])
            with self.graph.inserting_after(base):
                new = call(self.graph, aten.sym_size.int, (base, 0), like=value, origin=NAME)
            multiple = self.sizes.multiple(value.meta["val"])
            if multiple != 1:
                with self.graph.inserting_after(new):
                    new = call(self.graph, operator.mul, (new, multiple), like=value, origin=NAME)
        else:
            args = torch.fx.map_arg(value.args, self._localise(value))
            with self.graph.inserting_after(value):
                new = call(self.graph, value.target, args, like=value, origin=NAME)
        self.local_sizes[value] = new
        return new

    def finish(self, cp: int) -> None:
        """Make every output sum partial: a value that all ranks hold whole counts once, not ``cp`` times."""
        output = next(iter(reversed(self.graph.nodes)))
        results = list(output.args[0])
        for i, value in enumerate(results[FIRST_SUM:], FIRST_SUM):
            placement = info(value).placement
            if placement is None or placement.kind == Kind.PARTIAL:
                continue
            with self.graph.inserting_before(output):
                results[i] = call(
                    self.graph,
                    aten.div.Tensor,
                    (value, float(cp)),
                    like=value,
                    origin=NAME,
                    placement=PARTIAL,
                )
        output.args = (tuple(results),)

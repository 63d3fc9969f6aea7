"""Put the declared operator in the place of an attention whose forms are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.mask_forms import Branch, Form, Main
from spec_compile.analysis.row_rules import argument, rank
from spec_compile.ir.edit import call
from spec_compile.ir.meta import update

aten = torch.ops.aten
NAME = "RecogniseAttention"
DECLARED = torch.ops.spec_compile.branch_attention.default
VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Keys and values, [1, heads, rows, head_dim] or [heads, rows, head_dim], and which rows see them."""

    keys: Node
    values: Node
    form: Form


class Declarer:
    """Make nodes of the declared operator, and the vectors that it reads."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.inputs = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
        self.vectors: dict[tuple[str, int], Node] = {}
        self.at: Node = list(self.inputs.values())[-1]
        """The last of the inputs, and of what is made of them."""

    def declare(
        self, node: Node, q: Node, runs: Sequence[Run], each: int, scale: float
    ) -> tuple[Node, list[Run]]:
        """Make the operator in front of ``node``, in its shape.

        Args:
            node: the attention's result, [1, heads, rows, head_dim] or [heads, rows, head_dim].
            q: queries of the same shape.
            runs: of keys, one of which is the main one.
            each: queries a row or an anchor.
            scale: factor on the scores.

        Returns:
            The new result, and the keys and values that it reads: where heads were only copied, the few.
        """
        few = [Run(unrepeated(r.keys), unrepeated(r.values), r.form) for r in runs]
        if len({_heads(x) for run in few for x in (run.keys, run.values)}) > 1:
            few = list(runs)  # not all are copies
        (main,) = (run for run in few if isinstance(run.form, Main))
        form = main.form
        assert isinstance(form, Main)
        with self.graph.inserting_before(node):
            queries, k, v = (self._heads_last(x) for x in (q, main.keys, main.values))
            branches = [b for run in few for b in self._branches(run, each)]
            columns = [list(column) for column in zip(*branches, strict=True)] or [[], [], [], []]
            window = -1 if form.window is None else form.window
            args = (queries, k, v, *columns, *self._limits(form, each), None, scale, window)
            shape = (*queries.meta["val"].shape[:2], v.meta["val"].shape[2])
            out = self._call(DECLARED, args, node, queries.meta["val"].new_empty(shape))
            back = self._made(aten.transpose.int, (out, 0, 1), node)
            if rank(node) == 4:
                back = self._made(aten.unsqueeze.default, (back, 0), node)
        return back, few

    def _branches(self, run: Run, each: int) -> list[tuple[Node, Node, Node, Node]]:
        """(k, v, k_group, q_group) of a branch; one a slot where blocks are causal."""
        form = run.form
        if not isinstance(form, Branch):
            return []
        k, v = self._heads_last(run.keys), self._heads_last(run.values)
        if not form.causal:
            return [(k, v, *self._groups(form, each))]
        slots = [self._made(aten.unflatten.int, (x, 0, [-1, each]), x) for x in (k, v)]
        found = []
        for slot in range(each):
            own = [self._made(aten.select.int, (x, 1, slot), x) for x in slots]
            found.append((own[0], own[1], *self._slot_groups(form, each, slot)))
        return found

    def _heads_last(self, x: Node) -> Node:
        """[1, H, S, D] or [H, S, D] as [S, H, D]."""
        if rank(x) == 4:
            x = self._made(aten.squeeze.dim, (x, 0), x)
        return self._made(aten.transpose.int, (x, 0, 1), x)

    def _made(self, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        value = args[0].meta["val"]
        with value.fake_mode:
            val = target(value, *args[1:])
        return self._call(target, args, like, val)

    def _call(self, target: Any, args: tuple[Any, ...], like: Node, val: Any) -> Node:
        return call(self.graph, target, args, like=like, origin=NAME, val=val)

    def _limits(self, form: Main, each: int) -> tuple[Node, Node, Node]:
        """q_limit, q_document and k_document."""
        limit = self.vector(form.limit, each)
        if form.documents:
            anchored = form.limit.startswith("anchor")
            document = self.vector("anchor document" if anchored else "document", each)
            return limit, document, self.vector("document", 1)
        with self.graph.inserting_after(limit):
            nothing = self._batch(aten.zeros_like.default, (limit,))
        return limit, nothing, self.vector("no document", 1)

    def _groups(self, form: Branch, each: int) -> tuple[Node, Node]:
        """k_group and q_group."""
        if form.group == "row":
            return self.vector("index", 1), self.vector("index", 1)
        keys = self.vector("anchor number", each)
        used = form.group == "used block"
        return keys, self.vector("used anchor number", each) if used else keys

    def _slot_groups(self, form: Branch, each: int, slot: int) -> tuple[Node, Node]:
        """The same for the keys of one slot of all blocks, which earlier slots do not see."""
        used = self._groups(form, each)[1]
        key = (f"{form.group} from slot {slot}", each)
        if key not in self.vectors:
            late = self.behind(aten.ge.Scalar, (self._slot_number(each), slot))
            self.vectors[key] = self.behind(aten.where.ScalarOther, (late, used, -1))
        return self.vector("anchor number", 1), self.vectors[key]

    def _slot_number(self, each: int) -> Node:
        """The place in its block of every slot, int64 [A * each]."""
        if ("slot", each) not in self.vectors:
            anchors = self.inputs["anchors"]
            zero = self.behind(aten.zeros_like.default, (anchors,))
            column = self.behind(aten.unsqueeze.default, (zero, 1))
            place = self.behind(aten.arange.default, (each,), device=anchors.meta["val"].device)
            both = self.behind(aten.add.Tensor, (column, place))
            self.vectors["slot", each] = self.behind(aten.flatten.using_ints, (both, 0, 1))
        return self.vectors["slot", each]

    def vector(self, name: str, each: int) -> Node:
        """A vector of the declared form, made of the inputs: one entry a row, or ``each`` an anchor."""
        if (name, each) not in self.vectors:
            node = self.vectors[name, 1] if (name, 1) in self.vectors else VECTORS[name](self)
            self.vectors[name, 1] = node
            if each > 1:
                node = self.behind(aten.repeat_interleave.self_int, (node, each))
            self.vectors[name, each] = node
        return self.vectors[name, each]

    def behind(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
        """A value of the batch, behind the inputs and what was made there before."""
        with self.graph.inserting_after(self.at):
            node = self._batch(target, args, **kwargs)
        self.at = node
        return node

    def _batch(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
        like = self.inputs["index"]
        fake = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with like.meta["val"].fake_mode:
            val = target(*fake[0], **fake[1])
        node = call(self.graph, target, args, like=like, origin=NAME, val=val, kwargs=kwargs)
        update(node, role="batch")
        return node


def _number(r: Declarer) -> Node:
    anchors = r.inputs["anchors"]
    size = r.behind(aten.sym_size.int, (anchors, 0))
    return r.behind(aten.arange.default, (size,), device=anchors.meta["val"].device)


def _first_row(r: Declarer) -> Node:
    """The anchor's row; row 0 for unused ones."""
    return r.behind(aten.clamp_min.default, (r.inputs["anchors"], 0))


def _used_number(r: Declarer) -> Node:
    used = r.behind(aten.ge.Scalar, (r.inputs["anchors"], 0))
    return r.behind(aten.where.ScalarOther, (used, r.vector("anchor number", 1), -1))


def _rows(r: Declarer) -> Node:
    """T, at every row."""
    index = r.inputs["index"]
    size = r.behind(aten.sym_size.int, (index, 0))
    return r.behind(aten.full_like.default, (index, size))


VECTORS: dict[str, Any] = {
    "index": lambda r: r.inputs["index"],
    "index + 1": lambda r: r.behind(aten.add.Tensor, (r.inputs["index"], 1)),
    "rows": _rows,
    "document": lambda r: r.inputs["document"],
    "no document": lambda r: r.behind(aten.zeros_like.default, (r.inputs["document"],)),
    "anchor": lambda r: r.inputs["anchors"],
    "anchor + 1": lambda r: r.behind(aten.add.Tensor, (r.inputs["anchors"], 1)),
    "anchor document": lambda r: r.behind(
        aten.index.Tensor, (r.inputs["document"], [r.vector("anchor row", 1)])
    ),
    "anchor row": _first_row,
    "anchor number": _number,
    "used anchor number": _used_number,
}


def _heads(node: Node) -> int:
    return int(node.meta["val"].shape[-3])


def unrepeated(node: Node) -> Node:
    """Keys of fewer heads, where each was only copied for its group of query heads; else the node itself."""
    source: Any = node
    if source.target == aten.repeat_interleave.self_int:
        inner: Node = source.args[0]
        return inner if argument(source, "dim") in (rank(source) - 3, -3) else node
    while source.target in VIEWS:
        source = source.args[0]
    single: Any = source.args[0] if source.target == aten.expand.default else None
    if single is None or single.target != aten.unsqueeze.default or rank(single) != rank(node) + 1:
        return node
    inner = single.args[0]
    copied = int(argument(single, "dim")) % rank(single) == rank(single) - 3
    copied = copied and inner.meta["val"].shape[-1] == node.meta["val"].shape[-1]
    return inner if copied and _heads(node) % _heads(inner) == 0 else node

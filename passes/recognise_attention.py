"""Rewrite attention in PyTorch's own spelling to the declared operator, where its mask has one of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.mask_forms import Branch, Form, Main, Segment, find_forms
from spec_compile.analysis.row_rules import Refusal, argument, rank
from spec_compile.analysis.sizes import Rows
from spec_compile.errors import PlanError
from spec_compile.ir.edit import call
from spec_compile.ir.facts import facts, set_facts
from spec_compile.ir.meta import source_line, update

from .base import Cap, PassResult
from .joined_rows import JoinedRows

aten = torch.ops.aten
NAME = "RecogniseAttention"
SDPA = aten.scaled_dot_product_attention.default
DECLARED = torch.ops.spec_compile.branch_attention.default
VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default,
)  # fmt: skip
ADVICE = "write sc.branch_attention(q, k, v, branches, q_limit=..., q_document=..., k_document=...)"


@dataclass(frozen=True, slots=True)
class RecogniseAttention:
    """``scaled_dot_product_attention(q, cat(k), cat(v), mask)`` becomes ``branch_attention(q, k, v, branches)``.

    The mask is evaluated on every small packing and beyond its constants; what is of no known form is refused.
    """

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.ROLES})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        nodes = [n for n in gm.graph.nodes if n.target == SDPA]
        if not nodes:
            return PassResult(gm, 0)
        recogniser = _Recogniser(gm)
        for node in nodes:
            try:
                recogniser.rewrite(node)
            except Refusal as refusal:
                raise PlanError(
                    f"{source_line(node)}\n  {node.target} ({node.name}) {refusal}; {ADVICE}"
                ) from None
        recogniser.finish()
        gm.graph.eliminate_dead_code()
        return PassResult(gm, len(nodes))


class _Recogniser:
    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.sizes = Rows(gm.graph)
        self.joined = JoinedRows(gm)
        self.inputs = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
        self.forms: dict[Any, list[Form]] = {}
        self.vectors: dict[tuple[str, int], Node] = {}
        self.at: Node = list(self.inputs.values())[-1]
        """The last of the inputs, and of what is made of them."""

    def rewrite(self, node: Node) -> None:
        q, k, v = (argument(node, name) for name in ("query", "key", "value"))
        if argument(node, "dropout_p", 0.0) != 0.0:
            raise Refusal("has active dropout")
        for operand in (q, k, v):
            _check_batch(operand)
        keys, values = (self.joined.parts(x, rank(x) - 2) for x in (k, v))
        if len(keys) != len(values):
            raise Refusal("has keys and values that were joined differently")
        queries, segments = self._segment(q), [self._segment(part) for part in keys]
        forms = self._forms(node, queries, segments)
        mains = [i for i, form in enumerate(forms) if isinstance(form, Main)]
        if len(mains) != 1:
            raise Refusal(
                f"has {len(mains)} runs of main keys, expected one; the others must be branches"
            )
        runs = list(zip(keys, values, forms, strict=True))
        self._replace(node, q, runs, mains[0], queries.each)

    def finish(self) -> None:
        """Replace what still reads a part of joined rows."""
        for node, parts in self.joined.slices():
            if len(parts) == 1:
                node.replace_all_uses_with(parts[0])

    def _segment(self, node: Node) -> Segment:
        size = node.meta["val"].shape[-2]
        each, anchored = self.sizes.multiple(size), self.sizes.anchored(size)
        if each < 1 or (each > 1 and not anchored):
            raise Refusal(
                f"has {size} queries or keys in a run, expected one a row of the packed row, or several an anchor"
            )
        return Segment(anchored, each)

    def _forms(self, node: Node, queries: Segment, segments: Sequence[Segment]) -> list[Form]:
        mask, causal = argument(node, "attn_mask"), bool(argument(node, "is_causal", False))
        key = (mask, causal, queries, tuple(segments))
        if key not in self.forms:
            self.forms[key] = find_forms(self.gm, mask, queries, segments, causal=causal)
        return self.forms[key]

    def _replace(
        self, node: Node, q: Node, runs: list[tuple[Node, Node, Form]], main: int, each: int
    ) -> None:
        form = runs[main][2]
        assert isinstance(form, Main)
        scale = argument(node, "scale")
        scale = float(q.meta["val"].shape[-1]) ** -0.5 if scale is None else float(scale)
        few = [(_unrepeated(k), _unrepeated(v)) for k, v, _ in runs]
        if len({_heads(x) for pair in few for x in pair}) > 1:  # not all are copies
            few = [(k, v) for k, v, _ in runs]
        with self.graph.inserting_before(node):
            rows = [(self._heads_last(k), self._heads_last(v)) for k, v in few]
            columns: list[list[Node]] = [[], [], [], []]
            for pair, (_, _, branch) in zip(rows, runs, strict=True):
                if isinstance(branch, Branch):
                    values = (*pair, *self._groups(branch, each))
                    for column, value in zip(columns, values, strict=True):
                        column.append(value)
            queries, (k, v) = self._heads_last(q), rows[main]
            window = -1 if form.window is None else form.window
            args = (queries, k, v, *columns, *self._limits(form, each), None, scale, window)
            shape = (*queries.meta["val"].shape[:2], v.meta["val"].shape[2])
            out = self._call(DECLARED, args, node, queries.meta["val"].new_empty(shape))
            back = self._made(aten.transpose.int, (out, 0, 1), node)
            if rank(node) == 4:
                back = self._made(aten.unsqueeze.default, (back, 0), node)
        node.replace_all_uses_with(back)
        self._note(node, [runs[main][2], *(r[2] for i, r in enumerate(runs) if i != main)])
        self.graph.erase_node(node)

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
        limit = self._vector(form.limit, each)
        if form.documents:
            anchored = form.limit.startswith("anchor")
            document = self._vector("anchor document" if anchored else "document", each)
            return limit, document, self._vector("document", 1)
        with self.graph.inserting_after(limit):
            nothing = self._batch(aten.zeros_like.default, (limit,))
        return limit, nothing, self._vector("no document", 1)

    def _groups(self, form: Branch, each: int) -> tuple[Node, Node]:
        """k_group and q_group."""
        if form.group == "row":
            return self._vector("index", 1), self._vector("index", 1)
        keys = self._vector("anchor number", each)
        used = form.group == "used block"
        return keys, self._vector("used anchor number", each) if used else keys

    def _vector(self, name: str, each: int) -> Node:
        """A vector of the declared form, made of the inputs: one entry a row, or ``each`` an anchor."""
        if (name, each) not in self.vectors:
            node = self.vectors[name, 1] if (name, 1) in self.vectors else VECTORS[name](self)
            self.vectors[name, 1] = node
            if each > 1:
                node = self._behind(aten.repeat_interleave.self_int, (node, each))
            self.vectors[name, each] = node
        return self.vectors[name, each]

    def _behind(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
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

    def _note(self, node: Node, forms: list[Form]) -> None:
        text = ", ".join(_describe(form) for form in forms if form is not None)
        note = f"{node.name} ({source_line(node).partition(': ')[0]}) was recognised as: {text}"
        set_facts(self.gm, notes=(*facts(self.gm).notes, note))


def _number(r: _Recogniser) -> Node:
    anchors = r.inputs["anchors"]
    size = r._behind(aten.sym_size.int, (anchors, 0))
    return r._behind(aten.arange.default, (size,), device=anchors.meta["val"].device)


def _first_row(r: _Recogniser) -> Node:
    """The anchor's row; row 0 for unused ones."""
    return r._behind(aten.clamp_min.default, (r.inputs["anchors"], 0))


def _used_number(r: _Recogniser) -> Node:
    used = r._behind(aten.ge.Scalar, (r.inputs["anchors"], 0))
    return r._behind(aten.where.ScalarOther, (used, r._vector("anchor number", 1), -1))


def _rows(r: _Recogniser) -> Node:
    """T, at every row."""
    index = r.inputs["index"]
    size = r._behind(aten.sym_size.int, (index, 0))
    return r._behind(aten.full_like.default, (index, size))


VECTORS: dict[str, Any] = {
    "index": lambda r: r.inputs["index"],
    "index + 1": lambda r: r._behind(aten.add.Tensor, (r.inputs["index"], 1)),
    "rows": _rows,
    "document": lambda r: r.inputs["document"],
    "no document": lambda r: r._behind(aten.zeros_like.default, (r.inputs["document"],)),
    "anchor": lambda r: r.inputs["anchors"],
    "anchor + 1": lambda r: r._behind(aten.add.Tensor, (r.inputs["anchors"], 1)),
    "anchor document": lambda r: r._behind(
        aten.index.Tensor, (r.inputs["document"], [r._vector("anchor row", 1)])
    ),
    "anchor row": _first_row,
    "anchor number": _number,
    "used anchor number": _used_number,
}


def _check_batch(node: Node) -> None:
    shape = node.meta["val"].shape
    if len(shape) not in (3, 4) or (
        len(shape) == 4 and not (isinstance(shape[0], int) and shape[0] == 1)
    ):
        raise Refusal(f"has operands of shape {tuple(shape)}, expected [1, heads, rows, head_dim]")
    if isinstance(shape[-3], torch.SymInt):
        raise Refusal(
            f"has operands of shape {tuple(shape)}: the number of heads must be a constant"
        )


def _heads(node: Node) -> int:
    return int(node.meta["val"].shape[-3])


def _unrepeated(node: Node) -> Node:
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


def _describe(form: Form) -> str:
    if isinstance(form, Main):
        window = "" if form.window is None else f", window {form.window}"
        rows = "of the document" if form.documents else "of every document in the packed row"
        return f"main keys s < {form.limit} {rows}{window}"
    assert isinstance(form, Branch)
    return f"a branch by {form.group}"

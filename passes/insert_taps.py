"""Carry target features and embeddings across pipeline stages, outside the schedule."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.stages import BOUNDARY, assign
from spec_compile.ir.edit import call
from spec_compile.ir.facts import TapFact, facts, set_facts
from spec_compile.ir.meta import info, update
from spec_compile.ir.placement import rows

from .base import Cap, PassResult
from .tap_shapes import TapShape

ops = torch.ops.spec_compile
NAME = "InsertTaps"


@dataclass(frozen=True, slots=True)
class InsertTaps:
    """``use@last(x@i)`` becomes ``use@last(tap_recv@last())`` with one ``tap_send@i([x, ...])`` a source stage."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.STAGES})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.TAPS})

    def __call__(self, gm: GraphModule) -> PassResult:
        layers = facts(gm).stage_layers
        crossing = assign(gm, layers).crossing
        if crossing:
            _last_stage_last(gm, len(layers) - 1)
        recorded: list[TapFact] = []
        for source in sorted(crossing):
            recorded += _insert(gm, source, crossing[source], last=len(layers) - 1)
        set_facts(gm, tap_values=tuple(recorded))
        return PassResult(gm, len(recorded))


def _last_stage_last(gm: GraphModule, last: int) -> None:
    """Move the last stage's nodes behind all others, which never read them: every send can precede every receive."""
    output = next(iter(reversed(gm.graph.nodes)))
    for node in [n for n in gm.graph.nodes if info(n).stage == last]:
        output.prepend(node)


def _insert(gm: GraphModule, source: int, values: list[Node], last: int) -> list[TapFact]:
    graph = gm.graph
    like = _own(gm, "index")
    shapes = [TapShape(gm, value, _frame_of(gm, value, like), NAME) for value in values]
    described = [_describe(shape, source) for shape in shapes]
    order = {node: i for i, node in enumerate(graph.nodes)}
    final = max(values, key=order.__getitem__)
    users = [n for v in values for n in v.users if info(n).stage == last]
    first = min(users, key=order.__getitem__)
    widths, dtypes = [d.width for d in described], ",".join(d.dtype for d in described)
    with graph.inserting_before(final.next):
        sent = [shape.packed(source) for shape in shapes]
        send = call(graph, ops.tap_send.default, (sent, source), like=final, origin=NAME, val=())
    update(send, stage=source)
    with graph.inserting_before(first):
        received = call(
            graph,
            ops.tap_recv.default,
            (like, source, widths, dtypes),
            like=final,
            origin=NAME,
            val=tuple(v.meta["val"] for v in sent),
            placement=rows(0),
        )
    update(received, stage=last)
    for i, value in enumerate(values):
        with graph.inserting_before(first):
            part = call(
                graph,
                operator.getitem,
                (received, i),
                like=value,
                origin=NAME,
                val=sent[i].meta["val"],
                placement=rows(0),
            )
            update(part, stage=last)
            back = shapes[i].unpacked(part, last)
        value.replace_all_uses_with(back, delete_user_cb=_on_stage(last, back))
    return described


def _on_stage(stage: int, own: Node) -> Callable[[Node], bool]:
    return lambda node: info(node).stage == stage and node is not own


def _describe(shape: TapShape, source: int) -> TapFact:
    dtype = str(shape.value.meta["val"].dtype).removeprefix("torch.")
    return TapFact(source, shape.width, dtype, _origin(shape.value))


def _origin(value: Node) -> str:
    """What a tap carries, in words: the residual stream after some layers, or embeddings."""
    while value.target != BOUNDARY:
        if value.target == torch.ops.aten.embedding.default:
            return "embedding"
        value = value.all_input_nodes[0]
    return f"after {value.args[1]} layers"


def _frame_of(gm: GraphModule, value: Node, own_rows: Node) -> tuple[Node, Node | None]:
    """This rank's rows and, for a value with one entry or several an anchor, its anchors."""
    placement = info(value).placement
    anchored = placement is not None and placement.anchored
    return own_rows, _own(gm, "anchors") if anchored else None


def _own(gm: GraphModule, name: str) -> Node:
    """A vector with one entry for each of this rank's rows or anchors: its length is their number."""
    places = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
    numbers: Node = places[name]
    if facts(gm).cp == 1:
        return numbers
    own: list[Node] = [user for user in numbers.users if user.target == ops.shard_rows.default]
    if own:
        return own[0]
    slots = places["slots" if name == "index" else "anchor_slots"]
    with gm.graph.inserting_after(places["slots"]):  # the last input
        return call(
            gm.graph,
            ops.shard_rows.default,
            (numbers, slots, 0, "cp"),
            like=numbers,
            origin=NAME,
            placement=replace(rows(0), anchored=name == "anchors"),
        )

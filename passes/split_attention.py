"""Split attention into an exchanged main part and rank-local branches, joined by log-sum-exp."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import InvariantError
from spec_compile.ir.edit import call
from spec_compile.ir.facts import facts, set_facts
from spec_compile.ir.meta import info
from spec_compile.ir.placement import Kind, Placement, rows

from .base import Cap, PassResult
from .find_branches import ATTENTION

ops = torch.ops.spec_compile
NAME = "SplitAttention"
FABRIC = "cp"


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """``branch_attention(q, k, v, branches)`` becomes ``context_attention`` by ring, or over ``gather_rows(k, v)``.

    A general branch (keys shared between rows) is gathered too; a diagonal one stays on its rank.
    """

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.STRATEGY})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.PARTIALS})

    def __call__(self, gm: GraphModule) -> PassResult:
        slots = next(n for n in gm.graph.nodes if n.op == "placeholder" and n.target == "slots")
        gathered: dict[Node, Node] = {}
        nodes = [n for n in gm.graph.nodes if n.target == ATTENTION]
        general = 0
        for fact, node in zip(facts(gm).attentions, nodes, strict=True):
            general += _split(gm, node, slots, fact.strategy, fact.branches, gathered)
        set_facts(gm, general_branches=general)
        return PassResult(gm, len(nodes))


def _split(
    gm: GraphModule,
    node: Node,
    slots: Node,
    strategy: str,
    branches: tuple[str, ...],
    gathered: dict[Node, Node],
) -> int:
    graph = gm.graph
    (q, k, v, bk, bv, kg, qg, limit, q_doc, k_doc, sinks, scale, window) = _arguments(node)
    local = facts(gm).cp == 1

    def gather(value: Node) -> Node:
        if local:
            return value
        if value not in gathered:
            with graph.inserting_after(value):
                gathered[value] = call(
                    graph,
                    ops.gather_rows.default,
                    (value, FABRIC, 0),
                    like=value,
                    origin=NAME,
                    placement=Placement(Kind.FULL, 0),
                )
        return gathered[value]

    if strategy in ("all_gather", "local"):
        k, v, strategy = gather(k), gather(v), "local"
    kinds = "".join(kind[0] for kind in branches)
    for i, kind in enumerate(kinds):
        if kind == "g":
            bk[i], bv[i], kg[i] = gather(bk[i]), gather(bv[i]), gather(kg[i])
    placement = info(k_doc).placement
    if not local and (placement is None or placement.kind != Kind.FULL):
        raise InvariantError(
            f"after {NAME}: {node.name} reads k_document as {placement}, expected whole rows"
        )
    with graph.inserting_before(node):
        both = call(
            graph,
            ops.context_attention.default,
            (
                q,
                k,
                v,
                bk,
                bv,
                kg,
                qg,
                limit,
                q_doc,
                k_doc,
                slots,
                sinks,
                scale,
                window,
                kinds,
                strategy,
                "auto",
                FABRIC,
            ),
            like=node,
            origin=NAME,
            val=(node.meta["val"],),
            placement=rows(0),
        )
        out = call(graph, operator.getitem, (both, 0), like=node, origin=NAME)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return kinds.count("g")


def _arguments(node: Node) -> list[Any]:
    return [list(a) if isinstance(a, (list, tuple)) else a for a in node.args]

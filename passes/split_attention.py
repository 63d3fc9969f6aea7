"""Split attention into an exchanged main part and rank-local branches, joined by log-sum-exp."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import InvariantError
from spec_compile.ir.edit import call
from spec_compile.ir.facts import AttentionFact, facts, set_facts
from spec_compile.ir.meta import at_node, info
from spec_compile.ir.placement import Kind, Placement, rows
from spec_compile.ir.traffic import EITHER

from .base import Cap, PassResult
from .find_branches import ATTENTION

ops = torch.ops.spec_compile
NAME = "SplitAttention"
FABRIC = "cp"
LETTERS = {"diagonal": "d", "general": "r", "block": "g", "slots": "g"}
"""Kinds of branches as `context_attention` spells them."""
SHARED = ("general", "slots")
"""Kinds whose keys rows of other ranks may see."""
# columns of the declared operator's arguments
KEYS, VALUES, BRANCH_KEYS, BRANCH_VALUES, KEY_GROUPS = 1, 2, 3, 4, 5
LIMIT, QUERY_DOCUMENT, KEY_DOCUMENT, SINKS = 7, 8, 9, 10


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """``branch_attention(q, k, v, branches)`` becomes ``context_attention``, by its strategy.

    "all_gather" reads ``gather_packed`` of k and v; "pass_q", also where it is one of two, ``gather_rows`` of the
    limits and documents of all query rows, so that every rank knows who visits whom. A general branch (keys
    shared between rows) is gathered too; a diagonal one and a block stay on their rank.
    """

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.STRATEGY})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.PARTIALS})

    def __call__(self, gm: GraphModule) -> PassResult:
        splitter = _Splitter(gm)
        nodes = [n for n in gm.graph.nodes if n.target == ATTENTION]
        for fact, node in zip(facts(gm).attentions, nodes, strict=True):
            splitter.split(node, fact)
        kinds = [kind for fact in facts(gm).attentions for kind in fact.branches]
        set_facts(gm, general_branches=sum(kind in SHARED for kind in kinds))
        return PassResult(gm, len(nodes))


class _Splitter:
    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.sharded = facts(gm).cp > 1
        places = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
        self.slots: Node = places["slots"]
        self.live_rows: Node = places["live_rows"]
        self.gathered: dict[tuple[Node, bool], Node] = {}

    def split(self, node: Node, fact: AttentionFact) -> None:
        args: list[Any] = [list(a) if isinstance(a, (list, tuple)) else a for a in node.args]
        strategy = fact.strategy
        if strategy in ("all_gather", "local"):
            args[KEYS], args[VALUES] = (self._gather(args[i], packed=True) for i in (KEYS, VALUES))
            strategy = "local"
        elif strategy in ("pass_q", EITHER):
            for column in (LIMIT, QUERY_DOCUMENT):
                args[column] = self._gather(args[column])
        kinds = "".join(LETTERS[kind] for kind in fact.branches)
        for i, kind in enumerate(fact.branches):
            for column in (BRANCH_KEYS, BRANCH_VALUES, KEY_GROUPS) if kind in SHARED else ():
                # slots of anchors are no rows of the frame, and have no packed order
                args[column][i] = self._gather(args[column][i], packed=kind == "general")
        self._check_whole(node, args[KEY_DOCUMENT])
        frame = (self.slots, self.live_rows)
        lowered = [*args[:SINKS], *frame, *args[SINKS:], kinds, strategy, "auto", FABRIC]
        with self.graph.inserting_before(node):
            val = (node.meta["val"],)
            both = self._call(ops.context_attention.default, lowered, node, val, rows(0))
            out = self._call(operator.getitem, (both, 0), node, node.meta["val"], rows(0))
        node.replace_all_uses_with(out)
        self.graph.erase_node(node)

    def _gather(self, value: Node, *, packed: bool = False) -> Node:
        """All ranks' rows of a value, by packed row or by rank, once for all its readers."""
        if not self.sharded:
            return value
        if (value, packed) not in self.gathered:
            with self.graph.inserting_after(value):
                self.gathered[value, packed] = self._whole(value, packed)
        return self.gathered[value, packed]

    def _whole(self, value: Node, packed: bool) -> Node:
        # every rank has all rows of what was cut from a whole value
        cut = value.target == ops.shard_rows.default and value.args[2] == 0
        if cut and packed:
            (source, *_) = value.all_input_nodes
            return source
        whole: tuple[Any, Any] = (ops.gather_rows.default, (value, FABRIC, 0))
        if cut:
            whole = (torch.ops.aten.index_select.default, (value.args[0], 0, value.args[1]))
        elif packed:
            whole = (ops.gather_packed.default, (value, self.slots, FABRIC))
        return self._call(*whole, value, value.meta["val"], Placement(Kind.FULL, 0))

    def _check_whole(self, node: Node, k_document: Node) -> None:
        placement = info(k_document).placement
        if self.sharded and (placement is None or placement.kind != Kind.FULL):
            raise InvariantError(
                f"after {NAME}: {at_node(node, f'reads k_document as {placement}, expected whole rows')}"
            )

    def _call(
        self, target: Any, args: Sequence[Any], like: Node, val: Any, placement: Placement
    ) -> Node:
        return call(self.graph, target, args, like=like, origin=NAME, val=val, placement=placement)

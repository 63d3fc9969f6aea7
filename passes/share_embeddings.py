"""Send embeddings of shifted ids from their stage once: those of longer shifts are rows of the first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import call
from spec_compile.ir.facts import facts
from spec_compile.ir.meta import info

from .base import Cap, PassResult

aten = torch.ops.aten
ops = torch.ops.spec_compile
NAME = "ShareEmbeddings"


@dataclass(frozen=True, slots=True)
class ShareEmbeddings:
    """``embedding(w, shift(ids, k + 1))`` becomes ``embedding(w, shift(ids, k))[next]``, where stages may lie between.

    ``next[t]`` is the next row of t's document, and t itself at its end: there the shorter shift has
    embedded 0 already, as the longer one does. So the bits are the same, for k of 1 or more.

    Only without context parallelism: the next row may be another rank's, and an exchange in every step,
    which the draft waits for, would take the place of a tap that overlaps with computation.
    """

    pp: int
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.LOSSES})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        if self.pp == 1 or facts(gm).cp > 1:
            return PassResult(gm, 0)
        changes = 0
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        for shifts in _shifted(gm).values():
            known = [(k, node) for k, node in sorted(shifts.items()) if k >= 1]
            in_turn = all(order[a] < order[b] for (_, a), (_, b) in pairwise(known))
            if in_turn and len(known) > 1:
                _share(gm, known)
                changes += len(known) - 1
        return PassResult(gm, changes)


def _shifted(gm: GraphModule) -> dict[Any, dict[int, Node]]:
    """Embeddings in the draft, by table, ids and documents, then by shift."""
    found: defaultdict[Any, dict[int, Node]] = defaultdict(dict)
    for node in gm.graph.nodes:
        if node.target is not aten.embedding.default or info(node).role != "draft":
            continue
        table, ids, *rest = node.args
        if isinstance(ids, Node) and ids.target is ops.shift_whole.default:
            shifted: Any = ids.args
            base, k, *frame = shifted
            found[table, base, *frame, *rest][k] = node
    return found


def _share(gm: GraphModule, known: list[tuple[int, Node]]) -> None:
    """Read each embedding out of the one before it; they are sorted by shift."""
    index = next(n for n in gm.graph.nodes if n.op == "placeholder" and n.target == "index")

    def made(target: Any, *args: Any, like: Node) -> Node:
        return call(gm.graph, target, args, like=like, origin=NAME)

    (at, shared), (_, second) = known[:2]
    ids: Any = second.args[1]
    with gm.graph.inserting_before(second):
        ones = made(aten.ones_like.default, index, like=index)
        step = made(ops.shift_whole.default, ones, 1, *ids.args[2:], like=index)
        following = made(aten.add.Tensor, index, step, like=index)
    for k, longer in known[1:]:
        with gm.graph.inserting_before(longer):
            rows = following
            for _ in range(k - at - 1):
                rows = made(aten.index_select.default, following, 0, rows, like=index)
            shared = made(aten.index_select.default, shared, 0, rows, like=longer)
        longer.replace_all_uses_with(shared)
        gm.graph.erase_node(longer)
        at = k

"""Give shifts over the whole packed row their form for whole or for own rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import call
from spec_compile.ir.facts import add_note
from spec_compile.ir.meta import info, source_line
from spec_compile.ir.placement import Kind

from .base import Cap, PassResult

ops = torch.ops.spec_compile
NAME = "LowerRowShifts"
FABRIC = "cp"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowerRowShifts:
    """``row_shift(x, k)`` becomes ``row_shift_rows`` on own rows, ``row_shift_whole`` on whole ones."""

    dealt: bool = False
    """Whether documents are dealt to micro-batches: what lies beyond a document's border depends on it then."""
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.SHARDED})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        places = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
        nodes = [n for n in gm.graph.nodes if n.target == ops.row_shift.default]
        for node in nodes:
            _lower(gm, node, places["slots"], places["live_rows"])
        if nodes and self.dealt:
            lines = dict.fromkeys(source_line(node).partition(": ")[0] for node in nodes)
            note = (
                f"{', '.join(lines)} shift rows over document borders, and documents are dealt to micro-batches: rows "
                "at the borders depend on how. Mask them out, or use sc.shift, which ends with the document"
            )
            add_note(gm, note)
            log.warning("%s", note)
        return PassResult(gm, len(nodes))


def _lower(gm: GraphModule, node: Node, slots: Node, live_rows: Node) -> None:
    placement = info(node).placement
    if placement is not None and placement.kind == Kind.ROWS:
        target, args = ops.row_shift_rows.default, (*node.args, slots, live_rows, FABRIC)
    else:
        target, args = ops.row_shift_whole.default, (*node.args, live_rows)
    with gm.graph.inserting_before(node):
        new = call(gm.graph, target, args, like=node, origin=NAME)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)

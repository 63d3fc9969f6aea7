"""Place every value over the context-parallel ranks, and refuse drafts that look across rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from spec_compile.analysis.locality import analyse
from spec_compile.ir.meta import info, update

from .base import Cap, PassResult


@dataclass(frozen=True, slots=True)
class CheckLocality:
    """Nothing changes; every node is given its placement, or the plan is refused with the source line."""

    cp: int
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.BRANCHES})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.LOCAL})

    def __call__(self, gm: GraphModule) -> PassResult:
        result = analyse(gm.graph, lambda node: self.cp > 1 or info(node).role != "target")
        for node, placement in result.placements.items():
            if node.op != "output":
                update(node, placement=placement)
        return PassResult(gm, 0)

"""Choose for each attention how its main keys and values reach the other ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from spec_compile.analysis.cost import choose, exchange_costs
from spec_compile.ir.facts import AttentionFact, facts, set_facts

from .base import Cap, PassResult
from .find_branches import ATTENTION


@dataclass(frozen=True, slots=True)
class ChooseStrategy:
    """Nothing changes; the choice and its figures are written to the graph's facts."""

    cp: int
    strategy: str
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.SHARDED})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.STRATEGY})

    def __call__(self, gm: GraphModule) -> PassResult:
        nodes = [n for n in gm.graph.nodes if n.target == ATTENTION]
        readers = Counter((n.args[1], n.args[2]) for n in nodes)
        chosen = [
            self._choose(fact, node, readers[(node.args[1], node.args[2])])
            for fact, node in zip(facts(gm).attentions, nodes, strict=True)
        ]
        set_facts(gm, attentions=tuple(chosen))
        return PassResult(gm, 0)

    def _choose(self, fact: AttentionFact, node: Node, readers: int) -> AttentionFact:
        if self.cp == 1:
            return dataclasses.replace(fact, strategy="local", reason="one context-parallel rank")
        k: Any = node.args[1].meta["val"]  # type: ignore[union-attr]
        v: Any = node.args[2].meta["val"]  # type: ignore[union-attr]
        costs = exchange_costs(
            cp=self.cp,
            kv_heads=int(k.shape[1]),
            head_dim=int(k.shape[2]),
            value_dim=int(v.shape[2]),
            itemsize=k.dtype.itemsize,
            readers=readers,
        )
        if self.strategy != "auto":
            cost = costs[self.strategy]
            reason = f"asked for by the plan; {cost.sent_bytes / 1024:.0f} KiB sent per 1k tokens"
            return dataclasses.replace(fact, strategy=self.strategy, reason=reason)
        name, reason = choose(costs, readers)
        return dataclasses.replace(fact, strategy=name, reason=reason)

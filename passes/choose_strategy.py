"""Choose for each attention how its queries and its main keys and values meet."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from spec_compile.analysis.choice import Choice, choose
from spec_compile.analysis.cost import AttentionSize, Predicted
from spec_compile.analysis.hardware import hardware_for
from spec_compile.analysis.sizes import Rows
from spec_compile.ir.facts import AttentionFact, PlannedRow, StrategyFact, facts, set_facts

from .base import Cap, PassResult
from .find_branches import ATTENTION


@dataclass(frozen=True, slots=True)
class ChooseStrategy:
    """Nothing changes; the choice and the predictions behind it are written to the graph's facts."""

    cp: int
    strategy: str
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.SHARDED})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.STRATEGY})

    def __call__(self, gm: GraphModule) -> PassResult:
        nodes = [n for n in gm.graph.nodes if n.target == ATTENTION]
        rows = Rows(gm.graph)
        planned = facts(gm).planned_row
        device = next((p.device.type for p in gm.parameters()), "meta")
        readers: dict[Any, list[Node]] = {}
        for node in nodes:
            readers.setdefault((node.args[1], node.args[2]), []).append(node)
        choices: dict[Node, Choice] = {}
        for group in readers.values():
            sizes = [planned_size(node, rows, planned) for node in group]
            found = choose(sizes, self.cp, hardware_for(device))
            choices |= zip(group, found, strict=True)
        chosen = [
            self._choose(fact, choices[node])
            for fact, node in zip(facts(gm).attentions, nodes, strict=True)
        ]
        set_facts(gm, attentions=tuple(chosen))
        return PassResult(gm, 0)

    def _choose(self, fact: AttentionFact, choice: Choice) -> AttentionFact:
        if self.cp == 1:
            return dataclasses.replace(fact, strategy="local", reason="one context-parallel rank")
        name, reason, planned = choice.strategy, choice.reason, choice.planned
        if self.strategy != "auto":
            name, reason, planned = self.strategy, "asked for by the plan", self.strategy
        costs = tuple(_strategy_fact(p, planned) for p in choice.predicted.values())
        return dataclasses.replace(fact, strategy=name, reason=reason, costs=costs)


def planned_size(node: Node, sizes: Rows, planned: PlannedRow) -> AttentionSize:
    """Sizes of a declared attention over the planned row."""
    q, k, v = (node.args[i].meta["val"] for i in range(3))  # type: ignore[union-attr]
    window: Any = node.args[12]
    tokens = planned.tokens
    reach = tokens if window == -1 else min(int(window), tokens)
    queries = int(sizes.planned(q.shape[0], planned))
    # limits are spread evenly over the document
    mean_keys = reach - reach * reach / (2 * tokens)
    return AttentionSize(
        heads=int(q.shape[1]), kv_heads=int(k.shape[1]), head_dim=int(q.shape[2]),
        value_dim=int(v.shape[2]), itemsize=k.dtype.itemsize, keys=tokens, queries=queries,
        pairs=int(queries * mean_keys),
    )  # fmt: skip


def _strategy_fact(predicted: Predicted, planned: str) -> StrategyFact:
    return StrategyFact(
        name=predicted.strategy,
        sent_bytes=predicted.bytes,
        flops=predicted.flops,
        compute_ms=predicted.forward_compute_ms + predicted.backward_compute_ms,
        exchange_ms=predicted.forward_exchange_ms + predicted.backward_exchange_ms,
        total_ms=predicted.total_ms,
        planned=predicted.strategy == planned,
    )

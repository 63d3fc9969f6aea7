"""Write on every node the pipeline stage that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from spec_compile.analysis.balance import layer_costs, split_layers
from spec_compile.analysis.stages import assign
from spec_compile.ir.facts import set_facts
from spec_compile.ir.meta import update

from .base import Cap, PassResult


@dataclass(frozen=True, slots=True)
class AssignStages:
    """Layers are split by cost; the draft and the losses go last; cheap values have no stage and are repeated."""

    pp: int
    stages_per_rank: int = 1
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.PARTIALS, Cap.LOSSES})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.STAGES})

    def __call__(self, gm: GraphModule) -> PassResult:
        costs = layer_costs(gm)
        layers = split_layers(costs, self.pp, self.stages_per_rank)
        stages = assign(gm, layers)
        for node in gm.graph.nodes:
            update(node, stage=stages.stage.get(node))
        shares = tuple(costs.stage(*ends) for ends in layers)
        set_facts(gm, stage_layers=layers, stage_costs=shares)
        return PassResult(gm, len(layers))

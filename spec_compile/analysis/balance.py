"""How many layers each pipeline stage gets: few where the head, the losses and the draft are."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import PlanError
from spec_compile.ir.edit import attribute
from spec_compile.ir.facts import facts
from spec_compile.ir.meta import info
from spec_compile.ir.operator import NAMESPACE

from .sizes import Rows, product

PRODUCTS = {
    "linear": 0, "mm": 0, "matmul": 0, "bmm": 0, "addmm": 1, "expert_linear": 0, "embedding": None,
}  # fmt: skip
"""Products, by the argument whose last dimension is summed over; a row of a table is only read."""
AGAIN, TEACHER = 4 / 3, 2 / 3
"""Losses compute their logits again in the backward: four products where others take three, and two for a teacher's."""


@dataclass(frozen=True)
class LayerCosts:
    """Multiply-adds a token of the planned row with weights, forward; a backward takes twice as many everywhere."""

    layers: tuple[float, ...]
    embedding: float
    head: float
    """Of the head and the policy's losses."""
    draft: float

    def stage(self, first: int, past: int) -> float:
        """What a stage of layers ``first`` to ``past`` - 1 costs, with what belongs to either end."""
        total = sum(self.layers[first:past])
        if first == 0:
            total += self.embedding
        if past == len(self.layers):
            total += self.head + self.draft
        return total


def layer_costs(gm: GraphModule) -> LayerCosts:
    """Count the products with weights in a joint graph; attention itself is left out: it is alike in all layers."""
    count, rows = facts(gm).num_layers, Rows(gm.graph)
    layers, ends = [0.0] * count, {"embedding": 0.0, "head": 0.0, "draft": 0.0}
    for node in gm.graph.nodes:
        cost = _cost(node, gm, rows)
        here = info(node)
        if not cost:
            continue
        if here.role == "draft":
            ends["draft"] += cost
        elif here.layer is not None and here.layer < count:
            layers[here.layer] += cost
        else:
            ends["embedding" if _name(node) == "embedding" else "head"] += cost
    return LayerCosts(tuple(layers), **ends)


def _cost(node: Node, gm: GraphModule, rows: Rows) -> float:
    row = facts(gm).planned_row
    works = (times * rows.planned(work, row) for times, work in _works(node, gm))
    return sum(works) / row.tokens


def _works(node: Node, gm: GraphModule) -> list[tuple[float, Any]]:
    """Products of a node with weights: what each costs, and its multiply-adds for all rows."""
    name = _name(node)
    if name in PRODUCTS:
        weights = [_weight(a, gm) for a in node.all_input_nodes]
        if all(w is None or w.ndim < 2 for w in weights):
            return []
        place = PRODUCTS[name]
        summed = 1 if place is None else _shape(node.args[place])[-1]
        return [(1.0, product([*_shape(node), summed]))]
    read = [(_argument(node, i), _argument(node, i - 1), c) for i, c in loss_weights(node.target)]
    found = [(_weight(w, gm), left, times) for w, left, times in read]
    return [(c, product([*_shape(left), w.shape[0]])) for w, left, c in found if w is not None]


def _shape(node: Any) -> Any:
    return node.meta["val"].shape


def loss_weights(target: object) -> list[tuple[int, float]]:
    """Places of the head weights among the arguments of a loss of this package, and what a product costs.

    A loss is an operator of this package with arguments named ``weight`` or ``.._weight``, each behind the rows
    that it is multiplied with.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return []
    names = [a.name for a in target._schema.arguments]
    return [
        (i, TEACHER if name == "teacher_weight" else AGAIN)
        for i, name in enumerate(names)
        if name.split("_")[-1] == "weight"
    ]


def _argument(node: Node, place: int) -> object:
    name = node.target._schema.arguments[place].name  # type: ignore[union-attr]
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _name(node: Node) -> str:
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.split("::")[1] if is_operator else ""  # type: ignore[union-attr]


def _weight(node: object, gm: GraphModule) -> torch.nn.Parameter | None:
    """The parameter that a node holds, perhaps cast, detached or transposed."""
    while isinstance(node, Node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = attribute(gm, str(node.target))
    return value if isinstance(value, torch.nn.Parameter) else None


def split_layers(
    costs: LayerCosts, pp: int, stages_per_rank: int = 1
) -> tuple[tuple[int, int], ...]:
    """Layers of each stage as (first, past the last), at least one each, so that the dearest stage is cheapest.

    Ties go to more even sizes, then to larger first stages.

    Raises:
        PlanError: fewer layers than stages.
    """
    num_layers, num_stages = len(costs.layers), pp * stages_per_rank
    if num_stages > num_layers:
        count = f"{num_stages} stages" + (
            f", {stages_per_rank} a rank," if stages_per_rank > 1 else ""
        )
        raise PlanError(
            f"pp={pp}: {count} need as many decoder layers; the target has {num_layers}; use a smaller pp"
            + (" or stages_per_rank" if stages_per_rank > 1 else "")
        )
    # best[p]: the cheapest split of the first p layers into as many stages as were placed so far:
    # (dearest stage, sum of squared sizes, starts)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (-inf, 0, ())}
    for stage in range(num_stages):
        ends = range(stage + 1, num_layers - (num_stages - 1 - stage) + 1)
        if stage == num_stages - 1:
            ends = range(num_layers, num_layers + 1)
        best = {
            past: min(
                (
                    (
                        max(dearest, costs.stage(first, past)),
                        squares + (past - first) ** 2,
                        (*starts, first),
                    )
                    for first, (dearest, squares, starts) in best.items()
                    if first < past
                ),
                key=lambda split: (split[0], split[1], [-start for start in split[2]]),
            )
            for past in ends
        }
    starts = best[num_layers][2]
    return tuple(zip(starts, (*starts[1:], num_layers), strict=True))

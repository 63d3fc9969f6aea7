"""Which pipeline stage each node runs on, and which values leave their stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node

from spec_compile.errors import PlanError
from spec_compile.ir.edit import attribute
from spec_compile.ir.meta import at_node, info, source_line

BOUNDARY = torch.ops.spec_compile.boundary.default
VIEWS = {"detach", "squeeze", "unsqueeze", "view", "reshape", "alias", "clone", "to", "_to_copy"}


@dataclass
class StageMap:
    """Stages of a graph's nodes; a node in neither table is cheap and repeated wherever it is needed."""

    stage: dict[Node, int] = field(default_factory=dict)
    owners: dict[int, set[int]] = field(default_factory=dict)
    """id of a parameter -> stages that compute with it."""
    crossing: dict[int, list[Node]] = field(default_factory=dict)
    """Source stage -> values that the last stage reads outside the schedule."""
    graph: nx.DiGraph = field(default_factory=nx.DiGraph)


def assign(gm: GraphModule, layers: Sequence[tuple[int, int]]) -> StageMap:
    """Assign every node that computes with parameters or activations to a stage.

    Raises:
        PlanError: a value other than the residual stream or a detached tap would cross stages.
    """
    last = len(layers) - 1
    of_layer = {layer: s for s, (a, b) in enumerate(layers) for layer in range(a, b)}
    result = StageMap()
    weights = _weight_nodes(gm)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in weights:
            continue
        inputs = [result.stage[a] for a in node.all_input_nodes if a in result.stage]
        uses = [w for a in node.all_input_nodes for w in weights.get(a, ())]
        if not inputs and not uses:
            continue  # made from ids, masks and buffers alone
        role = info(node).role
        if role == "target":
            stage = max(inputs, default=0)
            if node.target == BOUNDARY:
                stage = max(stage, of_layer.get(int(node.args[1]), last))
            for weight in uses:
                result.owners.setdefault(weight, set()).add(stage)
        else:
            stage = _draft_stage(node, inputs, uses, result, last)
        result.stage[node] = stage
    _find_crossings(gm.graph, result, last)
    return result


def _weight_nodes(gm: GraphModule) -> dict[Node, frozenset[int]]:
    """Nodes that hold nothing but parameters (also detached, cast or transposed), with the parameters' ids."""
    found: dict[Node, frozenset[int]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target))
            if isinstance(value, torch.nn.Parameter):
                found[node] = frozenset({id(value)})
        elif (
            node.op == "call_function"
            and node.all_input_nodes
            and all(a in found for a in node.all_input_nodes)
        ):
            found[node] = frozenset().union(*(found[a] for a in node.all_input_nodes))
    return found


def _draft_stage(
    node: Node, inputs: list[int], uses: list[int], result: StageMap, last: int
) -> int:
    name = (
        node.target._schema.name.split("::")[1]
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )
    tensors = [a for a in node.all_input_nodes if a in result.stage]
    if (
        name in VIEWS
        and not uses
        and len(set(inputs)) == 1
        and (info(tensors[0]).role == "target" or _is_tap(tensors[0], result, last))
    ):
        return inputs[0]
    foreign = [w for w in uses if w in result.owners and last not in result.owners[w]]
    if foreign:
        if inputs:
            raise PlanError(
                at_node(
                    node,
                    "reads a weight of an earlier pipeline stage with values that only the last stage ",
                )
                + "has, for instance embeds predicted tokens; with pp > 1 make the ids from inputs.tokens, masks, "
                "positions and constants, give the draft a table of its own, or use pp=1"
            )
        return min(result.owners[foreign[0]])
    return last


def _is_tap(node: Node, result: StageMap, last: int) -> bool:
    return info(node).role == "draft" and result.stage[node] != last


def _find_crossings(graph: Graph, result: StageMap, last: int) -> None:
    result.graph.add_nodes_from(range(last + 1))
    for node in graph.nodes:
        here = result.stage.get(node)
        if here is None:
            continue
        for source in node.all_input_nodes:
            there = result.stage.get(source)
            if there is None or there == here:
                continue
            if node.target == BOUNDARY and here == there + 1:
                result.graph.add_edge(there, here, kind="schedule")
                continue
            if (
                info(node).role == "draft"
                and info(source).role == "draft"
                and here == last
                and there < here
            ):
                taps = result.crossing.setdefault(there, [])
                if source not in taps:
                    taps.append(source)
                result.graph.add_edge(there, here, kind="tap")
                continue
            raise PlanError(
                at_node(
                    source,
                    f"is a value of stage {there}, read on stage {here} by {source_line(node)}; only the ",
                )
                + "residual stream between layers and the draft's detached inputs may cross pipeline stages: use pp=1, "
                "or compute it again where it is read"
            )
    if not nx.is_directed_acyclic_graph(result.graph):
        raise PlanError("pipeline stages depend on each other in a circle")

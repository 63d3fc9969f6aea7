"""Cut the joint graph into one graph a pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from spec_compile.errors import InvariantError
from spec_compile.ir.facts import facts
from spec_compile.ir.meta import NodeInfo, at_node, info

BOUNDARY = torch.ops.spec_compile.boundary.default


def split_stages(gm: GraphModule) -> dict[str, GraphModule]:
    """``joint(batch)`` becomes ``stage1(batch, hidden=stage0(batch))``, one residual stream at each cut.

    Every stage takes the same batch inputs; ``hidden`` [1, n, D] comes last on all but the first.
    Nodes without a stage are repeated wherever they are needed.
    """
    return {f"stage{s}": _stage(gm, s) for s in range(len(facts(gm).stage_layers))}


def _stage(gm: GraphModule, stage: int) -> GraphModule:
    layers = facts(gm).stage_layers
    first, past = layers[stage]
    last = stage == len(layers) - 1
    graph, table = Graph(), {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            table[node] = graph.node_copy(node)
    placeholders = list(table.values())
    results: list[Node] = []
    for node in gm.graph.nodes:
        if info(node).stage != stage:
            if node.target == BOUNDARY and node.args[1] == past and not last:
                results = [_copy(node.args[0], graph, table, stage)]
            continue
        if node.target == BOUNDARY and stage > 0 and node.args[1] == first:
            with graph.inserting_after(placeholders[-1]):
                hidden = graph.placeholder("hidden")
            hidden.meta.update(node.meta)
            hidden.meta["spec"] = NodeInfo(
                "target", first, stage, info(node).placement, "split_stages"
            )
            table[node] = hidden
        else:
            _copy(node, graph, table, stage)
    if last:
        output = next(iter(reversed(gm.graph.nodes)))
        results = [_copy(value, graph, table, stage) for value in output.args[0]]
    graph.output(tuple(results))
    result = GraphModule(gm, graph, class_name=f"Stage{stage}")
    result.meta.update(gm.meta)
    result.graph.eliminate_dead_code()
    result.graph.lint()
    result.recompile()
    return result


def _copy(node: Any, graph: Graph, table: dict[Node, Node], stage: int) -> Node:
    """Copy a node and, before it, whatever it needs that was not copied yet."""
    stack = [node]
    while stack:
        top = stack[-1]
        if top not in table and info(top).stage not in (None, stage):
            raise InvariantError(
                "after split_stages: "
                + at_node(top, f"of stage {info(top).stage} is read on stage {stage} without a tap")
            )
        missing = [a for a in top.all_input_nodes if a not in table]
        if top in table:
            stack.pop()
        elif missing:
            stack.extend(missing)
        else:
            if top.target == BOUNDARY:
                table[top] = table[top.args[0]]
            else:
                table[top] = graph.node_copy(top, lambda n: table[n])
            stack.pop()
    return table[node]

"""Cut the last stage into the policy's program and the draft's: the draft can be left out or run alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from spec_compile.ir.edit import ancestors
from spec_compile.ir.meta import NodeInfo, info

POLICY_OUTPUTS = 2
COUNT_OUTPUT = 3


@dataclass(frozen=True)
class Programs:
    """The parts of a last stage. ``draft(batch, *crossing)`` gives loss_sum, count and stats."""

    policy: GraphModule
    """Outputs: log-probs [n], entropies [n], then the values that the draft reads."""
    draft: GraphModule | None
    """Inputs: the batch, then ``from_policy_0`` ...; None without a draft."""
    count: GraphModule | None
    """Batch to the draft's count; None when the count depends on activations."""


def split_programs(gm: GraphModule) -> Programs:
    """``stage(batch, hidden)`` becomes ``draft(batch, *policy(batch, hidden)[2:])``."""
    output = next(iter(reversed(gm.graph.nodes)))
    results: list[Node] = list(output.args[0])
    policy_nodes = ancestors(results[:POLICY_OUTPUTS])
    if len(results) == POLICY_OUTPUTS:
        return Programs(_program(gm, results, {}, "Policy"), None, None)
    draft_nodes = ancestors(results[POLICY_OUTPUTS:]) - policy_nodes
    crossing: list[Node] = []
    for node in gm.graph.nodes:
        if node in draft_nodes:
            crossing += [
                a for a in node.all_input_nodes if _crosses(a, policy_nodes) and a not in crossing
            ]
    policy = _program(gm, [*results[:POLICY_OUTPUTS], *crossing], {}, "Policy")
    names = {node: f"from_policy_{i}" for i, node in enumerate(crossing)}
    draft = _program(gm, results[POLICY_OUTPUTS:], names, "Draft")
    return Programs(policy, draft, _count_program(gm, results[COUNT_OUTPUT]))


def _crosses(node: Node, policy_nodes: set[Node]) -> bool:
    return (
        node in policy_nodes and node.op == "call_function" and info(node).stage is not None
    ) or (node.op == "placeholder" and node.target == "hidden")


def _program(
    gm: GraphModule, results: list[Node], given: dict[Node, str], name: str
) -> GraphModule:
    """The part of a graph that computes ``results``, with ``given`` nodes turned into inputs."""
    graph, table = Graph(), {}
    places = [
        n
        for n in gm.graph.nodes
        if n.op == "placeholder" and (name == "Policy" or n.target != "hidden")
    ]
    for node in places:
        table[node] = graph.node_copy(node)
    for node, label in given.items():
        table[node] = graph.placeholder(label)
        table[node].meta.update(node.meta)
        table[node].meta["spec"] = NodeInfo(
            "target", None, info(node).stage, info(node).placement, "split_programs"
        )
    needed = ancestors(results, stop=set(table))
    for node in gm.graph.nodes:
        keep = node in needed or (
            name == "Policy" and node.target == torch.ops.spec_compile.tap_send.default
        )
        if keep and node not in table:
            table[node] = graph.node_copy(node, lambda n: table[n])
    graph.output(tuple(table[n] for n in results))
    result = GraphModule(gm, graph, class_name=name)
    result.meta.update(gm.meta)
    return result


def _count_program(gm: GraphModule, count: Node) -> GraphModule | None:
    if info(count).origin == "ShardContext":  # divided by cp there; wanted is the whole count
        count = count.args[0]  # type: ignore[assignment]
    if any(n.op == "get_attr" or info(n).role in ("target", "draft") for n in ancestors([count])):
        return None
    return _program(gm, [count], {}, "Count")

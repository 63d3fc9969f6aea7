"""The invariants of the intermediate representation, numbered; each error begins with ``after <pass>:``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import InvariantError

from .facts import KEY as KEY_OF_GRAPH
from .facts import facts
from .meta import KEY, at_node, info
from .placement import Kind

INPUTS = ("tokens", "positions", "document", "index", "loss_mask", "temperature")
SUMS = {"sum_rows", "add", "sub", "mul", "div", "neg", "stack", "cat", "sum", "to", "_to_copy", "detach", "clone",
        "view", "reshape", "unsqueeze", "squeeze", "select", "slice", "getitem"}  # fmt: skip


def verify(gm: GraphModule, *, after: str) -> None:
    """Check every invariant; ``after`` names the pass that just ran.

    Raises:
        InvariantError: names the invariant, the pass and the node.
    """
    for number, check in enumerate(CHECKS, 1):
        problem = check(gm)
        if problem:
            raise InvariantError(f"after {after}: invariant {number} ({check.__name__}): {problem}")


def graph_is_ordered(gm: GraphModule) -> str:
    """FX's own lint: topological order, owned arguments, attributes that exist."""
    try:
        gm.graph.lint()
    except RuntimeError as error:
        return str(error)
    return ""


def nodes_are_described(gm: GraphModule) -> str:
    """Once roles are marked, every node but the output has facts and a fake value."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("output", "placeholder")]
    if not any(info(n).role for n in nodes):
        return ""
    bare = next((n for n in nodes if KEY not in n.meta or "val" not in n.meta), None)
    return at_node(bare, "has no facts or no value") if bare is not None else ""


def call_contract_holds(gm: GraphModule) -> str:
    """The batch inputs come first and keep their order."""
    names = tuple(str(n.target) for n in gm.graph.nodes if n.op == "placeholder")
    return (
        ""
        if names[: len(INPUTS)] == INPUTS
        else f"inputs are {names}, expected them to begin with {INPUTS}"
    )


def taps_pair_up(gm: GraphModule) -> str:
    """Each source stage has one tap_send and one tap_recv, with as many values on both sides."""
    ops = torch.ops.spec_compile
    sends = {n.args[1]: len(n.args[0]) for n in gm.graph.nodes if n.target == ops.tap_send.default}
    receives = {
        n.args[1]: len(n.args[2]) for n in gm.graph.nodes if n.target == ops.tap_recv.default
    }
    both = [n for n in gm.graph.nodes if n.target in (ops.tap_send.default, ops.tap_recv.default)]
    if not both or any("Stage" in type(gm).__name__ for _ in both[:1]):
        return ""
    if len(both) != len(sends) + len(receives) or sends != receives:
        return f"sends {sends}, receives {receives}"
    return ""


def partial_sums_are_reduced(gm: GraphModule) -> str:
    """Once rows are cut, a partial sum reaches only linear operators, a reduction, or the output."""
    if KEY_OF_GRAPH not in gm.meta or facts(gm).cp == 1:
        return ""
    for node in gm.graph.nodes:
        placement = info(node).placement
        if placement is None or placement.kind != Kind.PARTIAL:
            continue
        for user in node.users:
            if user.op != "output" and _name(user) not in SUMS:
                return at_node(user, f"reads {node.name}, which is a partial sum")
    return ""


def stages_are_separate(gm: GraphModule) -> str:
    """Once taps are explicit, an edge between stages is a residual stream entering the next stage."""
    if not any(n.target == torch.ops.spec_compile.tap_recv.default for n in gm.graph.nodes):
        return ""
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            a, b = info(source).stage, info(node).stage
            if a is not None and b is not None and a != b and _name(node) != "boundary":
                return at_node(node, f"of stage {b} reads {source.name} of stage {a}")
    return ""


def _name(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return str(getattr(node.target, "__name__", node.target))


CHECKS: tuple[Callable[[GraphModule], str], ...] = (
    graph_is_ordered,
    nodes_are_described,
    call_contract_holds,
    taps_pair_up,
    partial_sums_are_reduced,
    stages_are_separate,
)

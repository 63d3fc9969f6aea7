"""The only place that makes nodes: copies facts and source lines, and gives each node its fake value."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .meta import KEY, NodeInfo
from .placement import Placement

COPIED = ("nn_module_stack", "stack_trace", "tensor_meta")


def call(
    graph: Graph,
    target: Any,
    args: Sequence[Any],
    *,
    like: Node,
    origin: str,
    placement: Placement | None = None,
    val: Any = None,
    kwargs: dict[str, Any] | None = None,
) -> Node:
    """Insert a call at the graph's insertion point with the facts and source line of ``like``.

    Args:
        val: fake value in the frame of the captured graph; ``like``'s own when None.
        origin: name of the pass that makes the node.
    """
    node = graph.call_function(target, tuple(args), kwargs or {})
    for key in COPIED:
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = like.meta.get("val") if val is None else val
    facts = like.meta.get(KEY) or NodeInfo()
    node.meta[KEY] = NodeInfo(
        facts.role, facts.layer, facts.stage, placement or facts.placement, origin
    )
    return node


def attribute(module: torch.nn.Module, path: str) -> Any:
    """What a get_attr node reads: the attribute at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def ancestors(nodes: Sequence[Node], stop: Container[Node] = ()) -> set[Node]:
    """The nodes and everything that they are computed from, up to ``stop``."""
    stack, seen = list(nodes), set()
    while stack:
        node = stack.pop()
        if node not in seen and node not in stop:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def fake(node: Node) -> torch.Tensor | None:
    """The fake tensor of a node, or None when it holds something else."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None

"""Write on every node whether it belongs to the target or the draft, and to which layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import ancestors
from spec_compile.ir.facts import facts
from spec_compile.ir.meta import info, update

from .base import Cap, PassResult

POLICY_OUTPUTS = 2
"""The first outputs of the joint graph: log-probs and entropies."""


@dataclass(frozen=True, slots=True)
class MarkRoles:
    """Whatever the policy's log-probs need is "target"; ids and masks are "batch"; the rest is "draft"."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.CANONICAL, Cap.REGIONS_INLINE})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.ROLES})

    def __call__(self, gm: GraphModule) -> PassResult:
        output = next(iter(reversed(gm.graph.nodes)))
        policy = ancestors(output.args[0][:POLICY_OUTPUTS])
        layers: dict[Node, int] = {}
        for node in gm.graph.nodes:
            layer = max((layers[a] for a in node.all_input_nodes if a in layers), default=None)
            if node.target == torch.ops.spec_compile.boundary.default:
                layer = node.args[1]
            if layer is not None:
                layers[node] = layer
            if node.op in ("placeholder", "output"):
                role = ""
            elif node.op == "get_attr":
                role = str(node.target).split(".", 1)[0]
            elif all(_is_batch(a) for a in node.all_input_nodes):
                role = "batch"
            else:
                role = "target" if node in policy else "draft"
            shown = (
                layer
                if role == "target" and layer is not None and layer < facts(gm).num_layers
                else None
            )
            update(node, role=role, layer=shown, origin=_module_path(node))
        return PassResult(gm, len(gm.graph.nodes))


def _is_batch(node: Node) -> bool:
    return node.op == "placeholder" or info(node).role == "batch"


def _module_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [value[0] for value in stack.values() if isinstance(value, tuple)]
    return str(paths[-1]) if paths else ""

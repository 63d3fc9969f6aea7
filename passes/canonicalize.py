"""Remove what carries no meaning: assertions, casts to the same type, times 1, lent types, repeats, dead code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

from .base import Cap, PassResult

aten = torch.ops.aten
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
    aten._assert_scalar.default,
)
FACTORIES = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}
NEUTRAL = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0}
"""The number that changes nothing as the second argument."""
CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.type_as.default,
)


@dataclass(frozen=True, slots=True)
class Canonicalize:
    """Casts to the same type, ``x * 1``, dead nodes go; ``new_zeros(x, n)`` is ``zeros(n)``; equal nodes are one."""

    requires: ClassVar[frozenset[Cap]] = frozenset()
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.CANONICAL})

    def __call__(self, gm: GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        for node in list(gm.graph.nodes):
            if node.target in ASSERTIONS or (
                node.op == "call_module" and "_guards_fn" in str(node.target)
            ):
                gm.graph.erase_node(node)
            elif (node.target in CASTS and _same_type(node)) or _is_identity(node):
                source = node.args[0]
                assert isinstance(source, Node)
                node.replace_all_uses_with(source)
                gm.graph.erase_node(node)
            elif node.target in FACTORIES:
                _forget_lender(node)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        merged = CSEPass(banned_ops=get_CSE_banned_ops())(gm)
        if merged is not None and merged.modified:
            gm.graph = merged.graph_module.graph
        return PassResult(gm, before - len(gm.graph.nodes))


def _forget_lender(node: Node) -> None:
    """A constant does not depend on the tensor that lends it type and device."""
    value = node.meta["val"]
    node.kwargs = {"dtype": value.dtype, "device": value.device}
    node.args = node.args[1:]
    node.target = FACTORIES[node.target]  # type: ignore[index]


def _is_identity(node: Node) -> bool:
    """Whether it is ``x * 1`` or ``x / 1``, or ``x + 0`` of integers: a float's -0.0 + 0 is 0.0."""
    if node.target not in NEUTRAL or len(node.args) != 2 or node.kwargs:
        return False
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    if number != NEUTRAL[node.target] or not _same_type(node):
        return False
    return number == 1 or not node.meta["val"].is_floating_point()


def _same_type(node: Node) -> bool:
    source = node.args[0]
    if not isinstance(source, Node) or node.kwargs.get("copy") or node.kwargs.get("memory_format"):
        return False
    a, b = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.dtype, a.device, a.layout) == (b.dtype, b.device, b.layout)
    )

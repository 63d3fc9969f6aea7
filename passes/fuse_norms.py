"""Make one node of each written RMSNorm: torch has one kernel for it, a written one takes six and fp32 copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import call

from .base import Cap, PassResult
from .canonicalize import CASTS

aten = torch.ops.aten
NAME = "FuseNorms"
HALVES = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
"""A norm that is written in a half type rounds at every step, as no kernel does."""


@dataclass(frozen=True, slots=True)
class FuseNorms:
    """``x * rsqrt(mean(x ** 2, -1) + eps)`` becomes ``rms_norm(x)``, and casts that only enclose it go.

    A weight stays a node of its own: models differ in whether they round before they multiply, and
    ``rms_norm`` without a weight keeps each one's rounding. It accumulates in fp32 for half types, so
    forward bits differ from the written form's by the order of the sum alone.
    """

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.SHARDED})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        changes = 0
        for node in list(gm.graph.nodes):
            source, eps = _written(node)
            if source is None:
                continue
            rows, last = _without_casts(source, node)
            shape = [rows.meta["val"].shape[-1]]
            with gm.graph.inserting_before(node):
                args = (rows, shape, None, eps)
                norm = call(gm.graph, aten.rms_norm.default, args, like=last, origin=NAME)
            last.replace_all_uses_with(norm)
            changes += 1
        gm.graph.eliminate_dead_code()
        return PassResult(gm, changes)


def _written(node: Node) -> tuple[Node | None, Any]:
    """Its x and eps when the node is ``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``."""
    if node.target is not aten.mul.Tensor or len(node.args) != 2:
        return None, None
    for x, factor in (node.args, node.args[::-1]):
        total = _operand(factor, aten.rsqrt.default)
        if total is None or not isinstance(x, Node):
            continue
        mean = _operand(total, aten.add.Tensor)
        if mean is None or len(total.args) != 2 or not isinstance(total.args[1], float):
            continue
        square = _operand(mean, aten.mean.dim)
        if square is not None and _over_last(mean, x) and _is_square(square, x):
            return x, total.args[1]
    return None, None


def _operand(node: Any, target: Any) -> Node | None:
    """First operand of a call of ``target`` that has one reader and no options."""
    if not isinstance(node, Node) or node.target is not target or node.kwargs:
        return None
    return node.args[0] if len(node.users) == 1 and isinstance(node.args[0], Node) else None


def _over_last(mean: Node, x: Node) -> bool:
    """Whether a wide type's mean keeps all dimensions and runs over the last, whose size is known."""
    val = x.meta["val"]
    if not val.dim():
        return False
    last = mean.args[1:] in (([-1], True), ([val.dim() - 1], True))
    return last and isinstance(val.shape[-1], int) and val.dtype in WIDE


def _is_square(node: Node, x: Node) -> bool:
    if len(node.users) != 1 or node.kwargs:
        return False
    if node.target is aten.square.default:
        return node.args == (x,)
    if node.target is aten.pow.Tensor_Scalar:
        return node.args == (x, 2)
    return node.target is aten.mul.Tensor and node.args == (x, x)


def _without_casts(source: Node, product: Node) -> tuple[Node, Node]:
    """What is normed and what is read: outside of casts from a half type and back, where there are both."""
    half = source.args[0] if source.target in CASTS else None
    (reader,) = product.users if len(product.users) == 1 else (None,)
    if not isinstance(half, Node) or reader is None or reader.target not in CASTS:
        return source, product
    inner, outer = half.meta["val"], reader.meta["val"]
    same = (inner.dtype, inner.device) == (outer.dtype, outer.device)
    if reader.args[0] is product and same and inner.dtype in HALVES:
        wide = source.meta["val"]
        if (wide.dtype, wide.device) == (torch.float32, inner.device):
            return half, reader
    return source, product

"""Questions about symbolic sizes that never add guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from spec_compile.ir.facts import PlannedRow
from spec_compile.ir.printer import anchor_symbol, row_symbol

SIZED = ("aten::arange", "aten::linspace")
"""Operators with sizes among their numbers."""


class Rows:
    """Recognises row dimensions: a size that is a whole multiple of the number of rows, T or A anchors."""

    def __init__(self, graph: Graph) -> None:
        self.symbol = row_symbol(graph)
        self.anchors = anchor_symbol(graph)

    def multiple(self, size: Any) -> int:
        """``c`` when the size is ``c * T`` or ``c * A``, 0 when it is a constant, -1 for anything else."""
        if not isinstance(size, torch.SymInt):
            return 0
        expr = size.node.expr
        if not expr.free_symbols:
            return 0
        symbol = self.anchors if self.anchored(size) else self.symbol
        quotient = sympy.simplify(expr / symbol)
        return int(quotient) if quotient.is_Integer and quotient > 0 else -1

    def anchored(self, size: Any) -> bool:
        """Whether a size depends on the number of anchors."""
        if self.anchors is None or not isinstance(size, torch.SymInt):
            return False
        return self.anchors in size.node.expr.free_symbols

    def planned(self, size: Any, row: PlannedRow) -> float:
        """What a size, or a product of sizes, is for the planned row."""
        expr = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
        known = [(self.symbol, row.tokens), (self.anchors, row.anchors)]
        return float(expr.subs([(symbol, n) for symbol, n in known if symbol is not None]))

    def dims(self, node: Node) -> list[int]:
        """Dimensions of a node's value whose size depends on T or A."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return []
        return [d for d, size in enumerate(value.shape) if self.multiple(size) != 0]

    def depends(self, node: Node) -> bool:
        """Whether a number depends on T."""
        return self.symbol in _symbols(node)

    def depends_on_anchors(self, node: Node) -> bool:
        """Whether a number depends on A."""
        return self.anchors is not None and self.anchors in _symbols(node)


def _symbols(node: Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ()
    return value.node.expr.free_symbols


def number_arguments(node: Node) -> list[int | str]:
    """Arguments of an operator, by position or keyword, where an integer is a number, not a size."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target._schema.name in SIZED:
        return []
    found: list[int | str] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if str(argument.type).removeprefix("Optional[").startswith(("int", "List[int")):
            continue
        if i < len(node.args):
            found.append(i)
        elif argument.name in node.kwargs:
            found.append(argument.name)
    return found


def product(sizes: Sequence[Any]) -> Any:
    """Product as an expression."""
    result: Any = sympy.Integer(1)
    for size in sizes:
        result = result * (size.node.expr if isinstance(size, torch.SymInt) else size)
    return result

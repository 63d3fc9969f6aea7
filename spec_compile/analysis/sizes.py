"""Questions about symbolic sizes that never add guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from spec_compile.ir.printer import row_symbol

SIZED = ("aten::arange", "aten::linspace")
"""Operators with sizes among their numbers."""


class Rows:
    """Recognises the row dimension: a size that is a whole multiple of the number of rows ``T``."""

    def __init__(self, graph: Graph) -> None:
        self.symbol = row_symbol(graph)

    def multiple(self, size: Any) -> int:
        """``c`` when the size is ``c * T``, 0 when it does not depend on T, -1 for anything else."""
        if not isinstance(size, torch.SymInt):
            return 0
        expr = size.node.expr
        if self.symbol not in expr.free_symbols:
            return 0 if not expr.free_symbols else -1
        quotient = sympy.simplify(expr / self.symbol)
        return int(quotient) if quotient.is_Integer and quotient > 0 else -1

    def dims(self, node: Node) -> list[int]:
        """Dimensions of a node's value whose size depends on T."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return []
        return [d for d, size in enumerate(value.shape) if self.multiple(size) != 0]

    def depends(self, node: Node) -> bool:
        """Whether a number depends on T."""
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return False
        return self.symbol in value.node.expr.free_symbols


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

"""Sizes and positions along the packed row while it is traced, as ``rows * T + offset``."""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

T = sympy.Symbol("T", integer=True, positive=True)
EXAMPLE_ROWS, EXAMPLE_ANCHORS = 23, 11
"""Sizes of the example batch, both symbolic in the graph; they tell the two numbers apart while it is traced."""


class Position(NamedTuple):
    """A size, or a place between two rows: ``rows * T + offset``."""

    rows: int
    offset: int

    def moved(self, other: Position, sign: int = 1) -> Position:
        """The sum, or the difference for ``sign=-1``."""
        return Position(self.rows + sign * other.rows, self.offset + sign * other.offset)


def in_rows(expression: Any) -> Any:
    """An expression of traced sizes in T alone: each input has a symbol of its own until tracing joins them.

    Returns True for a condition that only joins two of them.
    """
    if not hasattr(expression, "free_symbols"):
        return expression
    result = expression.subs(dict.fromkeys(expression.free_symbols, T))
    return True if result is sympy.true else result


def position(value: Any) -> Position | None:
    """An int or a traced size as a position; None when it is neither a fixed int nor T plus one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        return None
    if isinstance(value, int):
        return Position(0, value)
    if not value.node.has_hint():
        return None
    size = sympy.expand(in_rows(value.node.expr))
    for rows in (0, 1):
        if (rest := sympy.expand(size - rows * T)).is_Integer:
            found = Position(rows, int(rest))
            return found if value.node.hint == rows * EXAMPLE_ROWS + found.offset else None
    return None


def row_dim(x: Tensor) -> int | None:
    """The one dimension of size T; None without one, or with several."""
    found = [
        d
        for d, size in enumerate(x.shape)
        if isinstance(size, torch.SymInt) and position(size) == Position(1, 0)
    ]
    return found[0] if len(found) == 1 else None

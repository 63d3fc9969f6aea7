"""What one row of an attention weighs on the wire: the cost model and the run-time choice both read it.

Gradients that add up on their way travel in the accumulator's type.
"""

from __future__ import annotations

from dataclasses import dataclass

EITHER = "ring or pass_q"
"""The strategy that leaves the choice to each micro-batch."""


@dataclass(frozen=True)
class RowBytes:
    """Bytes of single rows."""

    key: int
    """Key and value of one row."""
    key_gradient: int
    query: int
    partial: int
    """A query row's partial output with its log-sum-exp."""
    visitor: int
    """In the backward: a query row, its gradient, log-sum-exp and delta."""
    query_gradient: int

    @classmethod
    def of(
        cls, *, heads: int, kv_heads: int, head_dim: int, value_dim: int, itemsize: int
    ) -> RowBytes:
        """Weigh rows of an attention whose elements have ``itemsize`` bytes."""
        wide = max(4, itemsize)
        key = kv_heads * (head_dim + value_dim)
        return cls(
            key=key * itemsize,
            key_gradient=key * wide,
            query=heads * head_dim * itemsize,
            partial=heads * (value_dim * itemsize + wide),
            visitor=heads * ((head_dim + value_dim) * itemsize + 2 * wide),
            query_gradient=heads * head_dim * wide,
        )

"""How a value of the packed row lies over the context-parallel ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """Where the rows of a value are."""

    FULL = "full"
    """Rows of the whole packed row, the same on every rank; made from the batch alone."""
    ROWS = "rows"
    """This rank's rows only."""
    REPLICATED = "replicated"
    """No rows; the same on every rank."""
    PARTIAL = "partial"
    """A sum over this rank's rows; the true value is the sum over ranks."""


@dataclass(frozen=True)
class Placement:
    """Placement of one value; ``dim`` is the row dimension of FULL and ROWS values."""

    kind: Kind
    dim: int = -1
    batch: bool = False
    """Made from ids, masks and constants alone: no parameter and no activation."""
    anchored: bool = False
    """The rows are anchors, one or more entries each, not tokens of the packed row."""

    def __str__(self) -> str:
        kind = f"anchor {self.kind.value}" if self.anchored else self.kind.value
        return f"{kind}({self.dim})" if self.dim >= 0 else kind


def full(dim: int) -> Placement:
    """Whole rows at ``dim``."""
    return Placement(Kind.FULL, dim, batch=True)


def rows(dim: int) -> Placement:
    """Own rows at ``dim``."""
    return Placement(Kind.ROWS, dim)


def replicated(*, batch: bool) -> Placement:
    """No rows."""
    return Placement(Kind.REPLICATED, batch=batch)


PARTIAL = Placement(Kind.PARTIAL)

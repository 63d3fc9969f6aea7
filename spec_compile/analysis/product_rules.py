"""Row rules of products: linear layers, matrix products, einsum."""

from __future__ import annotations

from torch.fx import Node

from spec_compile.ir.placement import PARTIAL, Kind, Placement

from .row_rules import Refusal, Seen, has_rows, others_without_rows, rank, size_at
from .sizes import Rows


def linear_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """X @ W.T + b with a weight that has no rows."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    others_without_rows(seen, source)
    if has_rows(place) and place.dim == rank(source) - 1:
        raise Refusal("multiplies a matrix along the row dimension")
    return place.dim


def matmul_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Matrix products: the summed dimension must not be rows; rows on both sides must be one batch dimension."""
    operands = [a for a in node.args if isinstance(a, Node)]
    if len(operands) > 2 and has_rows(seen[operands[0]]):
        raise Refusal("adds rows to a product of matrices; write it with linear")
    a, b = operands[-2:]
    left, right = _matmul_dim(a, b, seen[a], first=True), _matmul_dim(b, a, seen[b], first=False)
    if left is not None and right is not None and left != right:
        raise Refusal("mixes rows with other rows (an outer product over the packed row)")
    dim = left if left is not None else right
    if dim is None:
        return -1
    if left is None or right is None:
        other = a if left is None else b
        if dim < -2 and size_at(other, dim, 0) not in (None, 1):
            raise Refusal("combines rows with a value of fixed length along the row dimension")
    lost = (rank(b) == 1) + (rank(a) == 1)
    return (
        int(node.meta["val"].ndim + dim + lost)
        if dim < -1 or not lost
        else node.meta["val"].ndim - 1
    )


def _matmul_dim(node: Node, other: Node, place: Placement, *, first: bool) -> int | None:
    """Row dimension of one factor counted from the right of the product, None without rows."""
    if not has_rows(place):
        return None
    dim = place.dim - rank(node)
    summed = -1 if first or rank(node) == 1 else -2
    if dim == summed:
        raise Refusal(
            "mixes rows: the row dimension is summed over by a matrix product; multiply elementwise and sum, "
            "(a * b).sum(0)"
        )
    return dim


def einsum_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """einsum: the letter of the row dimension must be the same everywhere and stay in the result."""
    equation = str(node.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = [a for a in node.args[1] if isinstance(a, Node)]  # type: ignore[union-attr]
    if "..." in equation or not arrow:
        raise Refusal("uses an einsum without explicit letters; write every letter and '->'")
    letters: set[str] = set()
    for terms, operand in zip(left.split(","), operands, strict=True):
        place = seen[operand]
        if has_rows(place):
            letters.add(terms[place.dim])
    if not letters:
        return -1
    if len(letters) > 1:
        raise Refusal("mixes rows with other rows")
    letter = letters.pop()
    for terms, operand in zip(left.split(","), operands, strict=True):
        if letter in terms and not has_rows(seen[operand]):
            raise Refusal("combines rows with a value of fixed length along the row dimension")
    if letter not in right:
        return (
            PARTIAL
            if any(seen[o].kind == Kind.ROWS for o in operands) and len(operands) == 1
            else _contract()
        )
    return right.index(letter)


def _contract() -> int:
    raise Refusal(
        "mixes rows: the row dimension is summed over in a product; multiply elementwise and sum, (a * b).sum(0)"
    )

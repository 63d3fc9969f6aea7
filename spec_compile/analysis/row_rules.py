"""How each operator treats the row dimension: one small rule a family of operators.

A rule maps a node and the placements of its arguments to the row dimension of the result (-1 when it
has none, a `Placement` for sums), or raises `Refusal` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from spec_compile.ir.placement import PARTIAL, Kind, Placement, replicated

from .sizes import Rows

Seen = dict[Node, Placement]
Rule = Callable[[Node, Seen, Rows], int | Placement]

KNOWN_ON_ROWS = (
    "write it with elementwise operations, products with weights and reductions over a row's own dimensions, and add "
    "rows up with .sum()"
)
"""What to write in the place of an operator that no rule knows."""


class Refusal(Exception):
    """Why a node is not token-local; becomes a PlanError with the source line.

    Args:
        reason: what it does.
        advice: what to do, where it is not what others of its kind are told.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The value of a schema argument, however it was passed."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, arg in enumerate(node.target._schema.arguments):
        if arg.name == name:
            if i < len(node.args):
                return node.args[i]
            return node.kwargs.get(name, arg.default_value if arg.has_default_value() else default)
    return default


def rank(node: Node) -> int:
    """Number of dimensions of a node's tensor."""
    value = node.meta["val"]
    return value.ndim if isinstance(value, torch.Tensor) else 0


def has_rows(place: Placement) -> bool:
    """Whether the value holds rows."""
    return place.kind in (Kind.FULL, Kind.ROWS)


def pointwise_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Elementwise with broadcasting: all operands must have rows in the same place."""
    if any(p.kind == Kind.PARTIAL for p in seen.values()):
        return PARTIAL
    out = node.meta["val"]
    ndim = out.ndim if isinstance(out, torch.Tensor) else rank(node.all_input_nodes[0])
    found: set[int] = set()
    for operand, place in seen.items():
        if has_rows(place):
            found.add(place.dim - rank(operand) + ndim)
    if len(found) > 1:
        raise Refusal("combines rows with other rows (an outer product over the packed row)")
    dim = found.pop() if found else -1
    for operand, place in seen.items():
        if dim >= 0 and not has_rows(place) and size_at(operand, dim, ndim) not in (None, 1):
            raise Refusal("combines rows with a value of fixed length along the row dimension")
    return dim


def size_at(node: Node, dim: int, ndim: int) -> Any:
    """Size of an operand at dimension ``dim`` of a result of ``ndim`` dimensions; None when it broadcasts."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    own = dim - ndim + value.ndim
    return value.shape[own] if own >= 0 else None  # missing leading dimensions broadcast


def same_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """One tensor in, the same rows out."""
    first = next(iter(seen.values()))
    return first if first.kind == Kind.PARTIAL else first.dim


def reduce_dims(node: Node, name: str = "dim") -> list[int] | None:
    """Dimensions a reduction runs over; None for all."""
    dims = argument(node, name)
    if dims is None or dims == []:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return [d % max(rank(source), 1) for d in listed]


def _after_reduction(node: Node, place: Placement, dims: list[int]) -> int:
    if argument(node, "keepdim", False):
        return place.dim
    return place.dim - sum(d < place.dim for d in dims)


def sum_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """A plain sum may run over rows: it becomes a partial sum, or a whole one on whole rows."""
    source = node.args[0]
    assert isinstance(source, Node)
    place, dims = seen[source], reduce_dims(node)
    if place.kind == Kind.PARTIAL:
        return PARTIAL
    if not has_rows(place):
        return -1
    if dims is None or place.dim in dims:
        return PARTIAL if place.kind == Kind.ROWS else replicated(batch=place.batch)
    return _after_reduction(node, place, dims)


def reduce_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Any other reduction or scan must leave the row dimension alone."""
    source = node.args[0]
    assert isinstance(source, Node)
    place, dims = seen[source], reduce_dims(node)
    if not has_rows(place):
        return -1
    if dims is None or place.dim in dims:
        raise Refusal("reduces or scans over the row dimension")
    return _after_reduction(node, place, dims)


def scan_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Softmax, sort, cumsum, flip and friends: same shape, must not run over rows."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    named = argument(node, "dims")
    dims = reduce_dims(node, "dims" if named is not None else "dim")
    if not has_rows(place):
        return -1
    if named == []:
        raise Refusal("moves values over all dimensions at once, rows included; give it dims")
    if dims is None:
        dims = [rank(source) - 1]
    if place.dim in dims:
        raise Refusal("runs over the row dimension")
    return place.dim


def others_without_rows(seen: Seen, source: Node) -> None:
    """Refuse rows in any operand but ``source``."""
    if any(has_rows(p) for a, p in seen.items() if a is not source):
        raise Refusal("uses rows as a weight: it mixes every row with every other")


def norm_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """layer_norm and rms_norm over trailing dimensions."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    others_without_rows(seen, source)
    if has_rows(place) and place.dim >= rank(source) - len(argument(node, "normalized_shape")):
        raise Refusal("normalises over the row dimension")
    return place.dim


def embedding_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """embedding(weight, ids): a table without rows."""
    weight, ids = node.args[:2]
    assert isinstance(weight, Node)
    assert isinstance(ids, Node)
    if has_rows(seen[weight]):
        raise Refusal("looks rows up in other rows")
    return seen[ids].dim


def gather_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Gather / take_along_dim along another dimension than rows."""
    source, index = node.args[0], argument(node, "index", argument(node, "indices"))
    assert isinstance(source, Node)
    along = argument(node, "dim")
    place, other = seen[source], seen[index]
    if not has_rows(place) and not has_rows(other):
        return -1
    if along is None or along % rank(source) == place.dim:
        raise Refusal("gathers rows from other rows; use sc.shift or sc.branch_attention")
    if place.dim != other.dim or has_rows(place) != has_rows(other):
        raise Refusal("gathers with an index whose rows lie elsewhere")
    return place.dim


def one_hot_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """one_hot: a new last dimension."""
    return next(iter(seen.values())).dim


def similarity_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """cosine_similarity: elementwise with broadcasting, then a sum over one dimension."""
    ndim = max(rank(a) for a in seen)
    found = {place.dim - rank(a) + ndim for a, place in seen.items() if has_rows(place)}
    along = int(argument(node, "dim", 1)) % ndim
    if len(found) > 1 or along in found:
        raise Refusal("compares rows with other rows")
    dim = found.pop() if found else -1
    return dim - (along < dim)


def index_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """x[ids] for a table x without rows; indexing rows themselves is refused."""
    source, indices = node.args[:2]
    assert isinstance(source, Node)
    if has_rows(seen[source]):
        raise Refusal(
            "indexes rows with other rows; use sc.shift, or gather along the last dimension"
        )
    listed = list(indices)  # type: ignore[arg-type]
    if len(listed) != 1 or not isinstance(listed[0], Node):
        if any(has_rows(seen[i]) for i in listed if isinstance(i, Node)):
            raise Refusal("indexes a table with several index tensors")
        return -1
    return seen[listed[0]].dim


def loss_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """cross_entropy, nll, kl_div, mse ...: reduction none keeps rows, sum is a sum, mean is refused."""
    source, other = node.args[:2]
    assert isinstance(source, Node)
    assert isinstance(other, Node)
    place = seen[source]
    if not any(has_rows(p) for p in seen.values()):
        return -1
    if place.dim != 0 or seen[other].dim != 0:
        raise Refusal("needs rows first in both of its arguments")
    name = node.target._schema.name  # type: ignore[union-attr]
    classes = name.startswith(("aten::cross_entropy", "aten::nll"))
    if (classes and rank(source) < 2) or (not classes and rank(source) != rank(other)):
        raise Refusal("runs over the row dimension or broadcasts rows against rows")
    reduction = argument(node, "reduction", 1)
    if reduction == 1:
        raise Refusal("averages over rows; use reduction='sum' or 'none' and a mask")
    if reduction == 2:
        return PARTIAL if place.kind == Kind.ROWS else replicated(batch=place.batch)
    return 0


def create_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """arange, zeros, ones, full: whole rows when their length is the packed row's."""
    dims = sizes.dims(node)
    if not dims:
        return replicated(batch=True)
    name = node.target._schema.name  # type: ignore[union-attr]
    first = [argument(node, a) for a in ("start", "step")] if name == "aten::arange" else []
    if name == "aten::linspace" or any(isinstance(a, Node) and sizes.depends(a) for a in first):
        raise Refusal(
            "counts in steps of the number of rows; compute it from inputs.index and x.shape[0]"
        )
    if len(dims) > 1 or sizes.multiple(node.meta["val"].shape[dims[0]]) != 1:
        raise Refusal("makes a value that has the packed row's length twice, or a multiple of it")
    return Placement(Kind.FULL, dims[0], batch=True)


def new_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """new_zeros and friends: made from constants, whatever the tensor that lends its type."""
    return create_rule(node, seen, sizes)

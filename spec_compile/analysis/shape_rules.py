"""Row rules of operators that only move or join values: views, transposes, cat, slices."""

from __future__ import annotations

from torch.fx import Node

from spec_compile.ir.placement import PARTIAL, Kind, Placement

from .row_rules import Refusal, Seen, argument, has_rows, rank, reduce_dims
from .sizes import Rows, product


def view_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Reshapes: what lies before the row dimension must stay, so that rows stay apart."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if place.kind == Kind.PARTIAL:
        return PARTIAL
    if not has_rows(place):
        if sizes.dims(node):
            raise Refusal("gives a value without rows a row dimension")
        return -1
    before = product(source.meta["val"].shape[: place.dim])
    out = node.meta["val"].shape
    for dim in sizes.dims(node):
        if sizes.multiple(out[dim]) > 0 and product(out[:dim]) == before:
            return dim
    raise Refusal(
        "moves rows: the row dimension must stay the slowest of the dimensions it is merged with"
    )


def transpose_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """transpose, permute, t, mT, movedim."""
    source = node.args[0]
    assert isinstance(source, Node)
    place, ndim = seen[source], rank(source)
    if not has_rows(place):
        return -1
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "aten::permute":
        order = [int(d) % ndim for d in argument(node, "dims")]
        return order.index(place.dim)
    if ndim < 2:
        return place.dim
    d0, d1 = (ndim - 2, ndim - 1) if name == "aten::mT" else (0, 1)
    if name == "aten::movedim":
        return _moved(node, place.dim, ndim)
    if name == "aten::transpose":
        d0, d1 = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
    return {d0: d1, d1: d0}.get(place.dim, place.dim)


def _moved(node: Node, dim: int, ndim: int) -> int:
    listed = [x if isinstance(x, (list, tuple)) else [x] for x in node.args[1:3]]
    source, destination = ([int(d) % ndim for d in x] for x in listed)  # type: ignore[arg-type]
    order: list[int] = [-1] * ndim
    for a, b in zip(source, destination, strict=True):
        order[b] = a
    rest = iter(d for d in range(ndim) if d not in source)
    return [next(rest) if d < 0 else d for d in order].index(dim)


def unsqueeze_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Unsqueeze."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if place.kind == Kind.PARTIAL:
        return PARTIAL
    if not has_rows(place):
        return -1
    at = int(node.args[1]) % (rank(source) + 1)  # type: ignore[arg-type]
    return place.dim + (at <= place.dim)


def squeeze_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """squeeze: the row dimension is never of size one (graphs run with at least two rows)."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if not has_rows(place):
        return place if place.kind == Kind.PARTIAL else -1
    value = source.meta["val"]
    dims = reduce_dims(node)
    gone = [
        d
        for d in (range(value.ndim) if dims is None else dims)
        if isinstance(value.shape[d], int) and value.shape[d] == 1
    ]
    return place.dim - sum(d < place.dim for d in gone)


def expand_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Expand and expand_as: aligned from the right."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    dims = sizes.dims(node)
    if not has_rows(place):
        return dims[0] if dims else (place if place.kind == Kind.PARTIAL else -1)
    dim = place.dim - rank(source) + rank(node)
    if dims != [dim]:
        raise Refusal("repeats rows along another dimension of the packed row's length")
    return dim


def cat_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """cat: not along rows."""
    dim = _joined(node, seen)
    if (
        isinstance(dim, int)
        and dim >= 0
        and dim == int(argument(node, "dim", 0)) % max(rank(node), 1)
    ):
        raise Refusal("joins along the row dimension")
    return dim


def stack_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """stack: a new dimension."""
    dim = _joined(node, seen)
    if not isinstance(dim, int) or dim < 0:
        return dim
    return dim + (int(argument(node, "dim", 0)) % max(rank(node), 1) <= dim)


def _joined(node: Node, seen: Seen) -> int | Placement:
    """The row dimension that all parts share; sums join to sums."""
    parts = [a for a in node.args[0] if isinstance(a, Node)]  # type: ignore[union-attr]
    if all(seen[p].kind == Kind.PARTIAL for p in parts):
        return PARTIAL
    dims = {seen[p].dim for p in parts if has_rows(seen[p])}
    if not dims:
        return -1
    if len(dims) > 1 or not all(has_rows(seen[p]) for p in parts):
        raise Refusal("joins values with rows and values without")
    return dims.pop()


def split_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """chunk, split, slice, narrow, select, unbind: not along rows, except a slice that keeps all."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if not has_rows(place):
        return place if place.kind == Kind.PARTIAL else -1
    along = int(argument(node, "dim", 0)) % rank(source)
    name = node.target._schema.name  # type: ignore[union-attr]
    if along == place.dim:
        if name == "aten::slice" and _keeps_everything(node, source, along):
            return place.dim
        raise Refusal("takes some of the rows")
    if name in ("aten::select", "aten::unbind"):
        return place.dim - (along < place.dim)
    return place.dim


def _keeps_everything(node: Node, source: Node, along: int) -> bool:
    start, end, step = (argument(node, k) for k in ("start", "end", "step"))
    size = source.meta["val"].shape[along]
    whole = end is None or (isinstance(end, int) and end >= 2**62)
    if isinstance(end, Node):
        whole = str(end.meta.get("val")) == str(size)
    return start in (None, 0) and step in (None, 1) and whole

"""How each operator treats the row dimension: one small rule a family of operators.

A rule maps a node and the placements of its arguments to the row dimension of the result (-1 when it
has none, a `Placement` for sums), or raises `Refusal` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from spec_compile.ir.placement import PARTIAL, Kind, Placement, replicated, rows

from .sizes import Rows, product

Seen = dict[Node, Placement]
Rule = Callable[[Node, Seen, Rows], int | Placement]


class Refusal(Exception):  # noqa: N818
    """Why a node is not token-local; becomes a PlanError with the source line."""


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
        if dim >= 0 and not has_rows(place) and _size_at(operand, dim, ndim) not in (None, 1):
            raise Refusal("combines rows with a value of fixed length along the row dimension")
    return dim


def _size_at(node: Node, dim: int, ndim: int) -> Any:
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
    dims = reduce_dims(node, "dims" if argument(node, "dims") is not None else "dim")
    if not has_rows(place):
        return -1
    if dims is None:
        dims = [rank(source) - 1]
    if place.dim in dims:
        raise Refusal("runs over the row dimension")
    return place.dim


def norm_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """layer_norm and rms_norm over trailing dimensions."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    _others_without_rows(seen, source)
    if has_rows(place) and place.dim >= rank(source) - len(argument(node, "normalized_shape")):
        raise Refusal("normalises over the row dimension")
    return place.dim


def linear_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """x @ W.T + b with a weight that has no rows."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    _others_without_rows(seen, source)
    if has_rows(place) and place.dim == rank(source) - 1:
        raise Refusal("multiplies a matrix along the row dimension")
    return place.dim


def _others_without_rows(seen: Seen, source: Node) -> None:
    if any(has_rows(p) for a, p in seen.items() if a is not source):
        raise Refusal("uses rows as a weight: it mixes every row with every other")


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
        if dim < -2 and _size_at(other, dim, 0) not in (None, 1):
            raise Refusal("combines rows with a value of fixed length along the row dimension")
    lost = (rank(b) == 1) + (rank(a) == 1)
    return int(node.meta["val"].ndim + dim + lost) if dim < -1 or not lost else node.meta["val"].ndim - 1


def _matmul_dim(node: Node, other: Node, place: Placement, *, first: bool) -> int | None:
    """Row dimension of one factor counted from the right of the product, None without rows."""
    if not has_rows(place):
        return None
    dim = place.dim - rank(node)
    summed = -1 if first or rank(node) == 1 else -2
    if dim == summed:
        raise Refusal("mixes rows: the row dimension is summed over by a matrix product")
    return dim


def einsum_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """einsum: the letter of the row dimension must be the same everywhere and stay in the result."""
    equation = str(node.args[0]).replace(" ", "")
    left, _, right = equation.partition("->")
    operands = [a for a in node.args[1] if isinstance(a, Node)]  # type: ignore[union-attr]
    if "..." in equation or not right:
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
        return PARTIAL if any(seen[o].kind == Kind.ROWS for o in operands) and len(operands) == 1 else _contract()
    return right.index(letter)


def _contract() -> int:
    raise Refusal("mixes rows: the row dimension is summed over in a product")


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
    raise Refusal("moves rows: the row dimension must stay the slowest of the dimensions it is merged with")


def transpose_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """transpose, permute, t, movedim."""
    source = node.args[0]
    assert isinstance(source, Node)
    place, ndim = seen[source], rank(source)
    if not has_rows(place):
        return -1
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "aten::permute":
        order = [d % ndim for d in argument(node, "dims")]
        return order.index(place.dim)
    d0, d1 = (0, 1) if name in ("aten::t", "aten::numpy_T") else (node.args[1] % ndim, node.args[2] % ndim)  # type: ignore[operator]
    if ndim < 2:
        return place.dim
    return {d0: d1, d1: d0}.get(place.dim, place.dim)


def unsqueeze_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """unsqueeze."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if place.kind == Kind.PARTIAL:
        return PARTIAL
    if not has_rows(place):
        return -1
    at = node.args[1] % (rank(source) + 1)  # type: ignore[operator]
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
    gone = [d for d in (range(value.ndim) if dims is None else dims) if isinstance(value.shape[d], int) and value.shape[d] == 1]
    return place.dim - sum(d < place.dim for d in gone)


def expand_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """expand and expand_as: aligned from the right."""
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
    """cat: not along rows; all parts have rows at one place."""
    parts = [a for a in node.args[0] if isinstance(a, Node)]  # type: ignore[union-attr]
    if all(seen[p].kind == Kind.PARTIAL for p in parts):
        return PARTIAL
    along = argument(node, "dim", 0) % max(rank(node), 1)
    dims = {seen[p].dim for p in parts if has_rows(seen[p])}
    if not dims:
        return -1
    if len(dims) > 1 or not all(has_rows(seen[p]) for p in parts):
        raise Refusal("joins values with rows and values without")
    dim = dims.pop()
    if dim == along:
        raise Refusal("joins along the row dimension")
    return dim


def stack_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """stack: a new dimension."""
    parts = [a for a in node.args[0] if isinstance(a, Node)]  # type: ignore[union-attr]
    if all(seen[p].kind == Kind.PARTIAL for p in parts):
        return PARTIAL
    dims = {seen[p].dim for p in parts if has_rows(seen[p])}
    if not dims:
        return -1
    if len(dims) > 1 or not all(has_rows(seen[p]) for p in parts):
        raise Refusal("joins values with rows and values without")
    dim = dims.pop()
    at = argument(node, "dim", 0) % max(rank(node), 1)
    return dim + (at <= dim)


def split_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """chunk, split, slice, narrow, select, unbind: not along rows, except a slice that keeps all."""
    source = node.args[0]
    assert isinstance(source, Node)
    place = seen[source]
    if not has_rows(place):
        return place if place.kind == Kind.PARTIAL else -1
    along = argument(node, "dim", 0) % rank(source)
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


def embedding_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """embedding(weight, ids): a table without rows."""
    weight, ids = node.args[:2]
    assert isinstance(weight, Node)
    assert isinstance(ids, Node)
    if has_rows(seen[weight]):
        raise Refusal("looks rows up in other rows")
    return seen[ids].dim


def gather_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """gather / take_along_dim along another dimension than rows."""
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


def index_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """x[ids] for a table x without rows; indexing rows themselves is refused."""
    source, indices = node.args[:2]
    assert isinstance(source, Node)
    if has_rows(seen[source]):
        raise Refusal("indexes rows with other rows; use sc.shift, or gather along the last dimension")
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
    if not has_rows(place):
        return -1
    if place.dim != 0 or seen[other].dim != 0:
        raise Refusal("needs rows first in both of its arguments")
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
    if len(dims) > 1 or sizes.multiple(node.meta["val"].shape[dims[0]]) != 1:
        raise Refusal("makes a value that has the packed row's length twice, or a multiple of it")
    return Placement(Kind.FULL, dims[0], batch=True)


def new_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """new_zeros and friends: made from constants, whatever the tensor that lends its type."""
    return create_rule(node, seen, sizes)


def attention_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Declared attention: every operand has rows first."""
    for operand, place in seen.items():
        if has_rows(place) and place.dim != 0:
            raise Refusal(f"needs rows first in {operand.name}")
    q = node.args[0]
    assert isinstance(q, Node)
    if not has_rows(seen[q]):
        raise Refusal("has queries that are not rows of the packed row; anchored drafts are not supported yet")
    return 0


def shift_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Declared shift."""
    source = node.args[0]
    assert isinstance(source, Node)
    if not has_rows(seen[source]) or seen[source].dim != 0:
        raise Refusal("needs rows first")
    return 0


def first_rows_rule(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Declared losses: hidden states with rows first, weights without."""
    for operand, place in seen.items():
        if has_rows(place) and place.dim != 0:
            raise Refusal(f"needs rows first in {operand.name}")
    source = node.args[0]
    assert isinstance(source, Node)
    return seen[source].dim


def refuse_sdpa(node: Node, seen: Seen, sizes: Rows) -> int | Placement:
    """Undeclared attention."""
    raise Refusal("is attention in a spelling that is not recognised yet; declare it with sc.branch_attention")


def _table() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    groups: list[tuple[Rule, str]] = [
        (pointwise_rule, "where square clip float_power true_divide divide multiply subtract floor_divide relu6 selu "
                         "log_sigmoid softsign hardswish rsub __and__ __or__ __xor__ logical_and logical_or "
                         "logical_not logical_xor isclose max.other min.other maximum minimum negative absolute "
                         "greater less not_equal bitwise_and bitwise_or bitwise_not"),
        (same_rule, "to _to_copy detach clone contiguous alias lift_fresh_copy type_as zeros_like ones_like "
                    "empty_like full_like rand_like dropout"),
        (sum_rule, "sum count_nonzero"),
        (reduce_rule, "mean amax amin max min prod logsumexp norm linalg_vector_norm var std any all argmax argmin "
                      "median var_mean std_mean"),
        (scan_rule, "softmax log_softmax _softmax _log_softmax cumsum cumprod flip roll sort argsort topk logcumsumexp "
                    "cummax cummin diff glu"),
        (norm_rule, "layer_norm rms_norm native_layer_norm"),
        (linear_rule, "linear"),
        (matmul_rule, "matmul mm bmm addmm baddbmm mv dot"),
        (view_rule, "view reshape _unsafe_view flatten unflatten view_as"),
        (transpose_rule, "transpose permute t numpy_T"),
        (unsqueeze_rule, "unsqueeze"),
        (squeeze_rule, "squeeze"),
        (expand_rule, "expand expand_as"),
        (cat_rule, "cat"),
        (stack_rule, "stack"),
        (split_rule, "chunk split split_with_sizes slice narrow select unbind"),
        (embedding_rule, "embedding"),
        (gather_rule, "gather take_along_dim"),
        (index_rule, "index"),
        (loss_rule, "cross_entropy_loss nll_loss nll_loss_nd kl_div mse_loss l1_loss smooth_l1_loss huber_loss "
                    "binary_cross_entropy binary_cross_entropy_with_logits"),
        (create_rule, "arange zeros ones full empty scalar_tensor eye linspace"),
        (new_rule, "new_zeros new_ones new_full new_empty"),
        (refuse_sdpa, "scaled_dot_product_attention"),
    ]  # fmt: skip
    for rule, names in groups:
        for name in names.split():
            table[f"aten::{name}"] = rule
    table["aten::einsum"] = einsum_rule
    table["spec_compile::branch_attention"] = attention_rule
    table["spec_compile::shift"] = shift_rule
    table["spec_compile::token_logprobs"] = first_rows_rule
    table["spec_compile::soft_cross_entropy"] = first_rows_rule
    table["spec_compile::boundary"] = same_rule
    return table


RULES = _table()
LINEAR_ON_SUMS = {
    "aten::add": "all", "aten::sub": "all", "aten::stack": "all", "aten::cat": "all",
    "aten::mul": "product", "aten::div": "scale", "aten::neg": "all", "aten::sum": "all",
    "aten::to": "all", "aten::_to_copy": "all", "aten::detach": "all", "aten::clone": "all",
    "aten::view": "all", "aten::reshape": "all", "aten::unsqueeze": "all", "aten::squeeze": "all",
    "aten::select": "all", "aten::slice": "all",
}  # fmt: skip

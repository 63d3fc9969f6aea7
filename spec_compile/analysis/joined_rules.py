"""Which operands of an operator have the rows of its result, and where: what may be done to each run of rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from spec_compile.ir.placement import Kind, Placement

from .row_rules import argument, pointwise_rule, rank
from .rule_table import RULES as ROW_RULES
from .shape_rules import transpose_rule
from .sizes import product

Operands = dict[Node, int]
"""Operands that have the rows, and in which dimension."""
Rule = Callable[[Node, int], Operands | None]
"""Maps a node and its row dimension to the operands, or None where rows are not followed further."""


def operands_with_rows(node: Node, dim: int) -> Operands | None:
    """Apply the rule of a node's operator."""
    if node.op != "call_function":
        return None
    if getattr(node.target, "__name__", "") == "getitem":
        return _same(node, dim)
    rule = RULES.get(operator_name(node))
    if rule is None and isinstance(node.target, torch._ops.OpOverload):
        named = ROW_RULES.get(node.target._schema.name)
        pointwise = named is pointwise_rule or torch.Tag.pointwise in node.target.tags
        rule = _pointwise if pointwise else None
    return None if rule is None else rule(node, dim)


def operator_name(node: Node) -> str:
    """Name of an operator without its namespace; empty for anything else."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return node.target._schema.name.partition("::")[2]


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor of a node; the first where it has several."""
    value: Any = node.meta["val"]
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return first


def along(node: Node, counted: Node | None = None) -> int:
    """The dimension that an operator is given, of its result or of another node's."""
    of: Any = counted
    return int(argument(node, "dim", 0)) % tensor(node if of is None else of).ndim


def _pointwise(node: Node, dim: int) -> Operands:
    """Operands that have the rows; those of size 1 there are read by every part."""
    found: Operands = {}
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        at = dim - tensor(node).ndim + value.ndim
        if at >= 0 and not (isinstance(value.shape[at], int) and value.shape[at] == 1):
            found[operand] = at
    return found


def _same(node: Node, dim: int) -> Operands:
    """Every tensor operand has the rows in the same place."""
    return {a: dim for a in node.all_input_nodes if not isinstance(a.meta.get("val"), torch.SymInt)}


def _not_along(node: Node, dim: int) -> Operands | None:
    """Like `_same`, for operators that must not run along the rows."""
    return None if along(node) == dim else _same(node, dim)


def _first(node: Node, dim: int) -> Operands | None:
    """Only the first operand has rows, not in its last dimension."""
    source: Any = node.args[0]
    return None if dim == rank(source) - 1 else {source: dim}


def _moved(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    for d in range(rank(source)):
        seen = {source: Placement(Kind.ROWS, d)}
        if transpose_rule(node, seen, None) == dim:  # type: ignore[arg-type]
            return {source: d}
    return None


def _unsqueezed(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    at = int(argument(node, "dim")) % tensor(node).ndim
    return None if at == dim else {source: dim - (at < dim)}


def _viewed(node: Node, dim: int) -> Operands | None:
    """A view that leaves the row dimension as it is, and all that lies before it together."""
    source: Any = node.args[0]
    shape, old = tensor(node).shape, tensor(source).shape
    others = [s for d, s in enumerate(shape) if d != dim]
    if any(isinstance(s, torch.SymInt) for s in others):
        return None
    for d, size in enumerate(old):
        if str(size) == str(shape[dim]) and product(old[:d]) == product(shape[:dim]):
            return {source: d}
    return None


def _expanded(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    others = [s for d, s in enumerate(tensor(node).shape) if d != dim]
    at = dim - tensor(node).ndim + rank(source)
    return None if at < 0 or any(isinstance(s, torch.SymInt) for s in others) else {source: at}


def _reduced(node: Node, dim: int) -> Operands | None:
    """A reduction over other dimensions, which it keeps or not."""
    source: Any = node.args[0]
    dims: Any = argument(node, "dim")
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    gone = [d % max(rank(source), 1) for d in listed]
    if not gone:
        return None
    if argument(node, "keepdim", False):
        return None if dim in gone else {source: dim}
    return {source: [d for d in range(rank(source)) if d not in gone][dim]}


def _squeezed(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    dims: Any = argument(node, "dim")
    listed = range(rank(source)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank(source) for d in listed}
    kept = [d for d, s in enumerate(tensor(source).shape) if d not in gone or str(s) != "1"]
    return {source: kept[dim]}


def _selected(node: Node, dim: int) -> Operands:
    source: Any = node.args[0]
    return {source: dim + (along(node, source) <= dim)}


def _stacked(node: Node, dim: int) -> Operands | None:
    at = along(node)
    return None if at == dim else {a: dim - (at < dim) for a in node.all_input_nodes}


def _counted_up(node: Node, dim: int) -> Operands | None:
    """one_hot: a new last dimension."""
    source: Any = node.args[0]
    return {source: dim} if dim < rank(source) else None


def _losses(node: Node, dim: int) -> Operands | None:
    """Losses of each row, not reduced; weights of classes have no rows."""
    kept = dim == 0 and argument(node, "reduction", 1) == 0 and argument(node, "weight") is None
    return dict.fromkeys([a for a in node.args[:2] if isinstance(a, Node)], 0) if kept else None


def _declared_losses(node: Node, dim: int) -> Operands | None:
    """Losses against laws and labels: rows first in all but heads and lists of columns."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = zip(names, node.args, strict=False)
    found = {a: 0 for name, a in given if isinstance(a, Node) and name in WITH_ROWS}
    return found if dim == 0 else None


def _declared_attention(node: Node, dim: int) -> Operands | None:
    """Queries and what they are compared by; keys are read by every run of queries."""
    args: Any = node.args
    found = dict.fromkeys([args[0], *args[6], args[7], args[8]], 0)
    keys = [args[1], args[2], *args[3], *args[4], *args[5], args[9]]
    return found if dim == 0 and not any(key in found for key in keys) else None


def _multiplied(node: Node, dim: int) -> Operands | None:
    """A product of matrices of equal rank, along the first's rows or the second's columns."""
    a, b = node.args[:2]
    if not isinstance(a, Node) or not isinstance(b, Node) or rank(a) != rank(b):
        return None
    last = rank(a) - 1
    return {b: last} if dim == last else {a: dim} if dim == last - 1 else None


def _looked_up(node: Node, dim: int) -> Operands | None:
    ids: Any = node.args[1]
    return {ids: dim} if dim < rank(ids) else None


def _indexed(node: Node, dim: int) -> Operands | None:
    """``table[ids]``."""
    listed: Any = node.args[1]
    if len(listed) != 1 or not isinstance(listed[0], Node):
        return None
    return {listed[0]: dim} if dim < rank(listed[0]) else None


def _repeated(node: Node, dim: int) -> Operands | None:
    source: Any = node.args[0]
    where = argument(node, "dim")
    return None if where is None or int(where) % rank(source) == dim else {source: dim}


def _table() -> dict[str, Rule]:
    groups: Sequence[tuple[Rule, str]] = (
        (_same, "to _to_copy clone contiguous detach alias type_as zeros_like ones_like full_like empty_like boundary"),
        (_not_along, "cat slice split chunk split_with_sizes softmax _softmax log_softmax _log_softmax narrow gather "
                     "cumsum sort argsort topk"),
        (_pointwise, "broadcast_tensors"),
        (_first, "linear rms_norm layer_norm"),
        (_moved, "transpose permute t"),
        (_unsqueezed, "unsqueeze"),
        (_squeezed, "squeeze"),
        (_selected, "select"),
        (_stacked, "stack"),
        (_viewed, "view reshape _unsafe_view flatten unflatten"),
        (_expanded, "expand"),
        (_reduced, "mean sum amax amin linalg_vector_norm logsumexp argmax argmin any all prod"),
        (_multiplied, "matmul bmm"),
        (_looked_up, "embedding"),
        (_indexed, "index"),
        (_repeated, "repeat_interleave"),
        (_counted_up, "one_hot"),
        (_losses, "cross_entropy_loss nll_loss nll_loss_nd kl_div mse_loss l1_loss smooth_l1_loss huber_loss "
                  "binary_cross_entropy binary_cross_entropy_with_logits"),
        (_declared_losses, "law_losses soft_cross_entropy label_losses token_logprobs"),
        (_declared_attention, "branch_attention"),
    )  # fmt: skip
    return {name: rule for rule, names in groups for name in names.split()}


WITH_ROWS = ("student", "teacher", "hidden", "labels", "live", "extra")
"""Arguments of declared losses that have one entry a row."""
RULES = _table()

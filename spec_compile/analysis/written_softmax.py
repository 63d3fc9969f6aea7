"""What a softmax that a draft wrote by hand seems to attend with: queries, runs of keys, runs of values, the result.

This is a guess from the operators around it. Nothing here is relied upon: what is guessed is proved by execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .joined_rules import operator_name, tensor
from .row_rules import Refusal, argument, rank
from .sizes import Rows

SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
MATMUL = ("matmul", "bmm")
KEPT = ("to", "_to_copy", "clone", "contiguous", "alias", "dropout", "type_as")
"""Operators behind a softmax that leave its weights as they are; what they really do is seen by execution."""
MOVES = ("transpose", "permute", "mT")
RESHAPED = ("unsqueeze", "squeeze", "view", "reshape", "transpose", "permute")
"""The same behind one column of weights."""
GUESSED = {"T": 1009, "A": 101}
"""Sizes by which places of columns are ordered."""


@dataclass(frozen=True)
class Scores:
    """Columns of scores: a product with keys, or one score a row."""

    node: Node
    query: Node
    keys: Node
    """[..., head_dim, rows] of a product, [..., rows, head_dim] of one score a row."""
    own: bool
    """One score a row, with the row's own key."""


@dataclass(frozen=True)
class Values:
    """Values that columns of weights are multiplied with, [..., rows, head_dim]."""

    node: Node
    own: bool
    """One column, each row with its own value."""


@dataclass(frozen=True)
class Written:
    """One attention."""

    softmax: Node
    scores: tuple[Scores, ...]
    """In the order of their columns."""
    values: tuple[Values, ...]
    output: Node
    layout: tuple[int, ...]
    """Which dimension of [..., heads, rows, head_dim] each dimension of the output is."""

    @property
    def query(self) -> Node:
        """[..., rows, head_dim]."""
        return self.scores[0].query

    @property
    def logits(self) -> Node:
        """What the softmax reads."""
        node: Any = self.softmax.args[0]
        assert isinstance(node, Node)
        return node


def is_softmax_of_rows(node: Node, sizes: Rows) -> bool:
    """Whether a node is a softmax over rows of scores that has rows in another dimension too."""
    if operator_name(node) not in SOFTMAX:
        return False
    shape = tensor(node).shape
    along = int(argument(node, "dim")) % len(shape)
    symbolic = [d for d, size in enumerate(shape) if sizes.multiple(size) != 0]
    return along in symbolic and len(symbolic) > 1


def read(softmax: Node, sizes: Rows) -> Written:
    """Guess what the attention around a softmax is.

    Raises:
        Refusal: the operators around it are none that such attention is made of; says which.
    """
    if int(argument(softmax, "dim")) % rank(softmax) != rank(softmax) - 1:
        raise Refusal("runs over another dimension than the last, in which scores have their keys")
    scores = _scores(softmax.args[0], {})  # type: ignore[arg-type]
    if not any(not s.own for s in scores):
        raise Refusal("is of scores that are no product of queries and keys")
    if any(s.query is not scores[0].query for s in scores):
        raise Refusal("is of scores of different queries")
    terms = _terms(softmax, sizes)
    output, layout = _sum_of(terms)
    return Written(softmax, scores, tuple(v for _, v in terms), output, layout)


def permutation(node: Node) -> tuple[int, ...] | None:
    """Which of its operand's dimensions each of a node's is; None where it does more than move them."""
    name, ndim = operator_name(node), rank(node)
    order = list(range(ndim))
    if name in ("transpose", "mT"):
        a, b = node.args[1:3] if name == "transpose" else (-2, -1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    elif name == "permute":
        order = [int(d) % ndim for d in argument(node, "dims")]
    elif name not in KEPT:
        return None
    return tuple(order)


def _scores(node: Node, known: dict[Node, tuple[Scores, ...]]) -> tuple[Scores, ...]:
    """Columns of scores that a value holds, in order."""
    if node not in known:
        known[node] = _columns(node, known)
    return known[node]


def _columns(node: Node, known: dict[Node, tuple[Scores, ...]]) -> tuple[Scores, ...]:
    name = operator_name(node)
    value = node.meta.get("val")
    if not name or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return ()  # ids, masks, and numbers of rows that shapes are made of
    if name in MATMUL:
        query, keys = node.args[:2]
        return (Scores(node, query, keys, own=False),)  # type: ignore[arg-type]
    if name == "sum" and (own := _own_scores(node)) is not None:
        return (own,)
    if name in ("cat", "stack"):
        listed: Any = node.args[0]
        found = [_scores(part, known) for part in listed]
        last = int(argument(node, "dim", 0)) % rank(node) == rank(node) - 1
        if any(found) and not (last and all(found)):
            raise Refusal(
                f"joins scores with something else, or not along their keys ({node.name})"
            )
        return tuple(s for part in found for s in part)
    held = [part for a in node.all_input_nodes if (part := _scores(a, known))]
    if len(held) > 1:
        raise Refusal(f"combines scores with scores ({node.target}, {node.name})")
    return held[0] if held else ()


def _own_scores(node: Node) -> Scores | None:
    """``(q * k).sum(-1)``."""
    source: Any = node.args[0]
    dims: Any = argument(node, "dim")
    if operator_name(source) != "mul" or [d % rank(source) for d in dims or ()] != [
        rank(source) - 1
    ]:
        return None
    query, keys = source.args[:2]
    if not isinstance(query, Node) or not isinstance(keys, Node) or rank(query) != rank(keys):
        return None
    return Scores(node, query, keys, own=True)


def _terms(softmax: Node, sizes: Rows) -> list[tuple[Node, Values]]:
    """Products of weights and values, by their nodes, in the order of their columns."""
    found: list[tuple[float, Node, Values]] = []
    work: list[tuple[Node, float, bool]] = [(softmax, 0.0, True)]
    while work:
        node, first, wide = work.pop()
        for user in node.users:
            name = operator_name(user)
            if name in KEPT or (name in RESHAPED and not wide):
                work.append((user, first, wide))
            elif name in ("slice", "select") and _last(user):
                start = argument(user, "start" if name == "slice" else "index")
                column = _place(start, node, sizes)
                one = name == "select" or tensor(user).shape[-1] == 1
                work.append((user, first + column, not one))
            elif name in MATMUL and user.args[0] is node and wide:
                found.append((first, user, Values(user.args[1], own=False)))  # type: ignore[arg-type]
            elif name == "mul" and not wide and len(user.all_input_nodes) == 2:
                (other,) = (a for a in user.all_input_nodes if a is not node)
                found.append((first, user, Values(other, own=True)))
            else:
                raise Refusal(f"has weights that are read by {user.target} ({user.name})")
    if not found:
        raise Refusal("has weights that no values are multiplied with")
    return [(node, values) for _, node, values in sorted(found, key=lambda term: term[0])]


def _last(node: Node) -> bool:
    source: Any = node.args[0]
    return int(argument(node, "dim", 0)) % rank(source) == rank(source) - 1


def _place(start: Any, source: Node, sizes: Rows) -> float:
    """First column that is taken, in a batch of guessed sizes."""

    def guessed(value: Any) -> float:
        value = value.meta["val"] if isinstance(value, Node) else value
        if not isinstance(value, torch.SymInt):
            return float(value or 0)
        known = {sizes.symbol: GUESSED["T"]}
        known |= {} if sizes.anchors is None else {sizes.anchors: GUESSED["A"]}
        return float(value.node.expr.subs(known))

    place = guessed(start)
    return place if place >= 0 else place + guessed(tensor(source).shape[-1])


def _sum_of(terms: Sequence[tuple[Node, Values]]) -> tuple[Node, tuple[int, ...]]:
    """The node that adds all products up, and its layout."""
    held = {n: None if v.own else tuple(range(rank(n))) for n, v in terms}
    while len(held) > 1:
        step = next((found for node in held if (found := _next(node, held))), None)
        if step is None:
            raise Refusal("has products of weights and values that are not added up")
        user, sources, layout = step
        held = {n: kept for n, kept in held.items() if n not in sources} | {user: layout}
    ((output, layout),) = held.items()
    if layout is None:
        raise Refusal("has no product of weights with the values of all rows")
    return output, layout


Layouts = dict[Node, tuple[int, ...] | None]


def _next(node: Node, held: Layouts) -> tuple[Node, set[Node], tuple[int, ...] | None] | None:
    """What reads a sum, where that is the sum with another one, or the same in another layout."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    sources, layout = set(user.all_input_nodes), held[node]
    if operator_name(user) == "add" and len(sources) > 1 and sources <= held.keys():
        known = [held[a] for a in sources if held[a] is not None]
        return user, sources, known[0] if known else None
    if (
        operator_name(user) == "add" and len(sources) == 1
    ):  # a number; `sum` of Python begins with 0
        return user, sources, layout
    moved = permutation(user)
    if moved is None or len(sources) > 1:
        return None
    return user, sources, None if layout is None else tuple(layout[d] for d in moved)

"""The part of a graph that computes one mask, as a function that can be run on small batches.

What a mask may be made of is limited to rows, positions, documents, anchors, sizes and constants, and to
operators that compare, combine and move integers. Such a function is fixed by the order in which its operands lie,
so that evaluating it on every small packing, and beyond its constants, decides what it is.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .evaluator import LIKE, Evaluator, made_of, schema_name
from .mask_worlds import World
from .row_rules import Refusal

INPUTS = ("index", "positions", "document", "anchors")
MADE = "zeros ones full eye arange scalar_tensor empty"
COMPARED = (
    "lt le gt ge eq ne less greater not_equal logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
    "bitwise_not bitwise_xor __and__ __or__ __xor__ where masked_fill tril triu any all"
)
COUNTED = (
    "add sub rsub neg abs clamp clamp_min clamp_max minimum maximum cumsum diff mul floor_divide div remainder fmod "
    "fill zero"
)
MOVED = (
    "cat stack slice select narrow view reshape _unsafe_view flatten unflatten expand expand_as broadcast_to "
    "broadcast_tensors roll flip unsqueeze squeeze transpose permute t movedim repeat tile repeat_interleave index "
    "index_select gather split chunk unbind to _to_copy clone contiguous detach alias lift_fresh_copy type_as view_as"
)
ALLOWED = frozenset(f"aten::{n}" for n in f"{MADE} {LIKE} {COMPARED} {COUNTED} {MOVED}".split())
PRODUCTS = ("aten::mul", "aten::floor_divide", "aten::div", "aten::remainder", "aten::fmod")
SUMS = ("aten::add", "aten::sub", "aten::rsub")
ACTING = (
    "other", "value", "min", "max", "fill_value", "repeats", "diagonal", "start", "end", "step", "shifts", "length",
    "index", "self",
)  # fmt: skip
"""Arguments that are numbers of rows; others are dimensions and shapes."""
FARTHEST = 1000
SENTINEL = 2**31
"""From here on an int means "to the end"."""
SMALL = 64
"""Constants above are replaced by smaller ones, consistently, before a mask is run."""


class MaskProgram:
    """Run the nodes that a mask is made of on batches of any size."""

    def __init__(self, gm: GraphModule, mask: Node) -> None:
        """Collect and check the nodes.

        Raises:
            Refusal: the mask is made of something else than rows, positions, documents, anchors and constants.
        """
        self.gm, self.mask = gm, mask
        self.evaluator = Evaluator(gm)
        self.nodes = made_of(mask)
        for node in self.nodes:
            self._check(node)
        self.constants = sorted({abs(c) for n in self.nodes for c in _integers(n)})

    def shrunk(self, base: int) -> dict[int, int]:
        """Smaller stand-ins of the large constants; neighbours stay neighbours."""
        stand_ins: dict[int, int] = {}
        first, place = -SMALL, base
        for constant in (c for c in self.constants if c > SMALL):
            if constant - first > 4:
                first, place = constant, place + base
            stand_ins[constant] = place + constant - first
        return stand_ins

    def reach(self, stand_ins: dict[int, int]) -> int:
        """How many rows it takes until no constant of the mask can still come into play, or more.

        Constants act together where one operator reads another's result (``index // 10 // 10 == 3``), so they
        multiply along the way to the mask.

        Raises:
            Refusal: more rows than can be tried.
        """
        found: dict[Node, int] = {}
        for node in self.nodes:
            sources = [found[a] for a in node.all_input_nodes if a in found]
            both = sum(sources) if schema_name(node) in SUMS else max(sources, default=1)
            own = [stand_ins.get(c, c) for c in _acting(node)]
            found[node] = max(both, 1) * math.prod(own)
        if found[self.mask] > FARTHEST:
            raise Refusal(
                f"has a mask whose constants act together up to row {found[self.mask]}, too far to try all that they "
                "do"
            )
        return found[self.mask]

    def __call__(self, world: World, stand_ins: dict[int, int]) -> Tensor:
        """Value of the mask's node in a batch.

        Raises:
            Refusal: it cannot be computed.
        """
        values: dict[Node, Any] = {}
        for node in self.nodes:
            values[node] = self.evaluator.value(node, world, values, stand_ins)
        result: Tensor = values[self.mask]
        return result

    def _check(self, node: Node) -> None:
        if node.op == "placeholder":
            if node.target not in INPUTS:
                raise Refusal(f"has a mask that depends on {node.target}; {ALLOWED_TEXT}")
        elif node.op == "get_attr":
            if self.evaluator.is_parameter(node):
                raise Refusal(f"has a mask that depends on {node.target}; {ALLOWED_TEXT}")
        elif getattr(node.target, "__name__", "") == "getitem":
            return
        elif schema_name(node) not in ALLOWED:
            raise Refusal(f"has a mask that is made with {node.target}; {ALLOWED_TEXT}")
        elif (
            schema_name(node) in PRODUCTS and sum(_is_counted(a) for a in node.all_input_nodes) > 1
        ):
            raise Refusal("has a mask that multiplies or divides rows by rows")


ALLOWED_TEXT = (
    "it may be made of index, positions, document, anchors, sizes and constants, compared and moved"
)


def _is_counted(node: Node) -> bool:
    """Whether a node holds integers that are no truth values."""
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.dtype != torch.bool
        and not value.is_floating_point()
        and value.ndim > 0
    )


def _acting(node: Node) -> list[int]:
    """Constants of one operator that are compared with or added to rows, or multiply or divide them."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[int] = []
    for at, described in enumerate(node.target._schema.arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(described.name)
        if described.name not in ACTING:
            continue
        if isinstance(value, Node):
            number = value.meta["val"]
            expr = number.node.expr if isinstance(number, torch.SymInt) else None
            found += [abs(int(c)) for c in expr.atoms(sympy.Integer)] if expr is not None else []
        else:
            found += [abs(c) for c in _ints(value)]
    return [c for c in found if c > 1]


def _integers(node: Node) -> list[int]:
    """All integers among a node's arguments."""
    return _ints(node.args) + _ints(list(node.kwargs.values()))


def _ints(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [c for part in value for c in _ints(part)]
    return [value] if type(value) is int and abs(value) < SENTINEL else []

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

from spec_compile.ir.edit import attribute

from .evaluator import LIKE, SENTINEL, Evaluator, made_of, replaced, schema_name
from .mask_documents import MOVED, Documents
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
JOINED = "cat stack broadcast_tensors"
ALLOWED = frozenset(
    f"aten::{n}" for n in (*f"{MADE} {LIKE} {COMPARED} {COUNTED} {JOINED}".split(), *MOVED)
)
PRODUCTS = ("aten::mul", "aten::floor_divide", "aten::div", "aten::remainder", "aten::fmod")
EQUAL = ("aten::eq", "aten::ne", "aten::not_equal")
SUMS = ("aten::add", "aten::sub", "aten::rsub")
ACTING = (
    "other", "value", "min", "max", "fill_value", "repeats", "diagonal", "start", "end", "step", "shifts", "length",
    "index", "self", "s", "alpha", "split_size",
)  # fmt: skip
"""Arguments that are numbers of rows; others are dimensions and shapes."""
FARTHEST = 1000
NUMBERING = (*INPUTS, "aten::arange", "aten::cumsum")
"""What numbers rows come from."""
NARROW = (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16)
"""Types that do not hold the numbers of all rows."""
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
        self.numbering: set[Node] = set()
        """What holds numbers of rows, whatever its type; truth values do not."""
        self.last = {read: node for node in self.nodes for read in node.all_input_nodes}
        """What reads a value last, after which it is let go."""
        documents = Documents(gm)
        for node in self.nodes:
            self._check(node)
            documents.check(node)
        found = {abs(c) for n in self.nodes for c in _numbers([*n.args, *n.kwargs.values()])}
        found |= {abs(c) for n in self.nodes for c in self._held(n)}
        self.constants = sorted({math.floor(c) for c in found})

    def shrunk(self, base: int) -> dict[int, int]:
        """Smaller stand-ins of the large constants; neighbours stay neighbours."""
        stand_ins: dict[int, int] = {}
        first, place = -SMALL, base
        for constant in (c for c in self.constants if c > SMALL):
            if constant - first > 4:
                first, place = constant, place + base
            stand_ins[constant] = place + constant - first
        return stand_ins

    def reach(self, stand_ins: dict[int, int], *, anchors: bool = False) -> int:
        """How many rows it takes until no constant of the mask can still come into play, or more.

        Constants act together where one operator reads another's result (``index // 10 // 10 == 3``), so they
        multiply along the way to the mask.

        Args:
            stand_ins: smaller constants.
            anchors: count in anchors, of which each has several slots, not in rows.

        Raises:
            Refusal: more rows than can be tried.
        """
        found: dict[Node, float] = {}
        fixed: set[Node] = set()  # tensors of constants
        for node in self.nodes:
            sources = [a for a in node.all_input_nodes if a in found]
            moved = [found[a] for a in sources if a not in fixed]
            both = (sum if schema_name(node) in SUMS else max)(moved or [1])
            if not moved and not _is_numbering(node):
                fixed.add(node)
            acting = _acting(node) if not (anchors and _is_repeating(node)) else []
            own: list[float] = [
                _reach(replaced(c, stand_ins)) for c in [*acting, *self._held(node)]
            ]
            slots = self._slots(node) if anchors else 0
            own += [1 / slots] if slots > 0 else [_reach(c) for c in _in_sizes(node)]
            own += [found[a] for a in sources if a in fixed]
            found[node] = both * math.prod(own)
        farthest = math.ceil(found[self.mask])
        if farthest > FARTHEST:
            raise Refusal(
                f"has a mask whose constants act together up to row {farthest}, too far to try all that they do"
            )
        return farthest

    def __call__(self, world: World, stand_ins: dict[int, int]) -> Tensor:
        """Value of the mask's node in a batch.

        Raises:
            Refusal: it cannot be computed.
        """
        values: dict[Node, Any] = {}
        for node in self.nodes:
            values[node] = self.evaluator.value(node, world, values, stand_ins)
            for read in node.all_input_nodes:
                if self.last.get(read) is node:
                    values.pop(read, None)
        result: Tensor = values[self.mask]
        return result

    def _slots(self, node: Node) -> int:
        """How many slots an anchor has among those that a node numbers, or 0 or less."""
        if schema_name(node) != "aten::arange":
            return 0
        sizes = [a.meta["val"] for a in node.args if isinstance(a, Node)]
        anchored = [size for size in sizes if self.evaluator.sizes.anchored(size)]
        return max(map(self.evaluator.sizes.multiple, anchored), default=0)

    def _held(self, node: Node) -> list[int | float]:
        """Numbers in a tensor of constants, and its sizes: rows can be compared with them, or look into it."""
        if node.op != "get_attr":
            return []
        held: Tensor = attribute(self.gm, str(node.target))
        if held.dtype == torch.bool or not held.numel():
            return list(held.shape)
        extremes = [c.item() for c in (held.amin(), held.amax())]
        return _numbers(extremes[:1] if held.numel() == 1 else [*extremes, *held.shape])

    def _check(self, node: Node) -> None:
        if node.op == "placeholder":
            if node.target not in INPUTS:
                raise Refusal(f"has a mask that depends on {node.target}; {ALLOWED_TEXT}")
        elif node.op == "get_attr":
            if self.evaluator.is_parameter(node):
                reason = f"has a mask that depends on {node.target}; {ALLOWED_TEXT}"
                raise Refusal(reason, NO_BIAS)
        elif getattr(node.target, "__name__", "") == "getitem":
            return
        elif schema_name(node) not in ALLOWED:
            raise Refusal(f"has a mask that is made with {node.target}; {ALLOWED_TEXT}")
        elif (
            schema_name(node) in PRODUCTS
            and sum(self._is_counted(a) for a in node.all_input_nodes) > 1
        ):
            raise Refusal("has a mask that multiplies or divides rows by rows")
        elif schema_name(node) in EQUAL and any(abs(c) > SMALL for c in _acting(node)):
            raise Refusal(
                f"has a mask that picks rows by == with a number above {SMALL}, for which no smaller one can stand"
            )
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.dtype == torch.bool:
            return
        if _is_numbering(node) or not self.numbering.isdisjoint(node.all_input_nodes):
            self.numbering.add(node)
            if value.dtype in NARROW:
                raise Refusal(
                    f"has a mask with numbers of rows in {value.dtype}, which cannot hold them all; use int64"
                )

    def _is_counted(self, node: Node) -> bool:
        """Whether a node holds numbers of rows, or other integers that are no truth values."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype == torch.bool or value.ndim == 0:
            return False
        return node in self.numbering or not value.is_floating_point()


NO_BIAS = (
    "no spelling has biases of scores (ALiBi, relative positions) or masks of single heads, nor has "
    "sc.branch_attention: leave them out, and give positions to q and k (rotary) or to the states"
)
ALLOWED_TEXT = (
    "it may be made of index, positions, document, anchors, sizes and constants, compared and moved"
)


def _is_numbering(node: Node) -> bool:
    """Whether numbers of rows begin here."""
    return (node.target if node.op == "placeholder" else schema_name(node)) in NUMBERING


def _is_repeating(node: Node) -> bool:
    return schema_name(node) == "aten::repeat_interleave"


def _acting(node: Node) -> list[int | float]:
    """Constants of one operator that are compared with or added to rows, or multiply or divide them."""
    return _numbers([value for value in _arguments(node) if not isinstance(value, Node)])


def _in_sizes(node: Node) -> list[int | float]:
    """Constants in sizes that act like those of `_acting`; no smaller ones ever stand for them."""
    numbers = [a.meta["val"] for a in _arguments(node) if isinstance(a, Node)]
    exprs = [n.node.expr for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat))]
    return [float(abs(c)) for expr in exprs for c in expr.atoms(sympy.Number) if c]


def _arguments(node: Node) -> list[Any]:
    """Arguments of an operator that are numbers of rows."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    described = enumerate(node.target._schema.arguments)
    named = [
        (a.name, node.args[i] if i < len(node.args) else node.kwargs.get(a.name))
        for i, a in described
    ]
    return [value for name, value in named if name in ACTING]


def _numbers(value: Any) -> list[int | float]:
    """All numbers but those that stand for the end, and 0."""
    if isinstance(value, (list, tuple)):
        return [c for part in value for c in _numbers(part)]
    return [value] if type(value) in (int, float) and 0 < abs(value) < SENTINEL else []


def _reach(number: float) -> int:
    """Rows that a number can act on as a summand, factor or divisor."""
    return math.ceil(max(abs(number), 1 / abs(number)))

"""The part of a graph that computes one mask, as a function that can be run on small batches.

What a mask may be made of is limited to rows, positions, documents, anchors, sizes and constants, and to
operators that compare, combine and move integers. Such a function is fixed by the order in which its operands lie,
so that evaluating it on every small packing, and beyond its constants, decides what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import attribute

from .mask_worlds import World
from .row_rules import Refusal, argument
from .sizes import Rows

INPUTS = ("index", "positions", "document", "anchors")
MADE = "zeros ones full eye arange scalar_tensor empty"
LIKE = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
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
EQUAL = ("aten::eq", "aten::ne", "aten::not_equal")
SUMS = ("aten::add", "aten::sub", "aten::rsub")
ACTING = (
    "other", "value", "min", "max", "fill_value", "repeats", "diagonal", "start", "end", "step", "shifts", "length",
    "index", "self", "s", "alpha", "split_size",
)  # fmt: skip
"""Arguments that are numbers of rows; others are dimensions and shapes."""
FARTHEST = 1000
SENTINEL = 10**9
"""From here on a number means "to the end", or hides a key."""
NUMBERING = (*INPUTS, "aten::arange", "aten::cumsum")
"""What numbers rows come from."""
NARROW = (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16)
"""Types that do not hold the numbers of all rows."""
SMALL = 64
"""Constants above are replaced by smaller ones, consistently, before a mask is run."""
NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class MaskProgram:
    """Run the nodes that a mask is made of on batches of any size."""

    def __init__(self, gm: GraphModule, mask: Node) -> None:
        """Collect and check the nodes.

        Raises:
            Refusal: the mask is made of something else than rows, positions, documents, anchors and constants.
        """
        self.gm, self.mask = gm, mask
        self.sizes = Rows(gm.graph)
        self.nodes = _made_of(mask)
        self.numbering: set[Node] = set()
        """What holds numbers of rows, whatever its type; truth values do not."""
        for node in self.nodes:
            self._check(node)
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

    def reach(self, stand_ins: dict[int, int]) -> int:
        """How many rows it takes until no constant of the mask can still come into play, or more.

        Constants act together where one operator reads another's result (``index // 10 // 10 == 3``), so they
        multiply along the way to the mask.

        Raises:
            Refusal: more rows than can be tried.
        """
        found: dict[Node, int] = {}
        fixed: set[Node] = set()  # tensors of constants
        for node in self.nodes:
            sources = [a for a in node.all_input_nodes if a in found]
            moved = [found[a] for a in sources if a not in fixed]
            both = sum(moved) if _name(node) in SUMS else max(moved, default=1)
            if not moved and not _is_numbering(node):
                fixed.add(node)
            own = [_reach(_replaced(c, stand_ins)) for c in [*_acting(node), *self._held(node)]]
            own += [_reach(c) for c in _in_sizes(node)]
            own += [found[a] for a in sources if a in fixed]
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
            values[node] = self._value(node, world, values, stand_ins)
        result: Tensor = values[self.mask]
        return result

    def number(self, value: Any, world: World) -> Any:
        """A size or other number in a batch."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        known = {self.sizes.symbol: world.rows}
        if self.sizes.anchors is not None:
            known[self.sizes.anchors] = len(world.anchors)
        found = value.node.expr.subs(known)
        if found.free_symbols:
            raise Refusal(f"depends on the size {value}, which is neither rows nor anchors")
        kind = {torch.SymInt: int, torch.SymFloat: float}.get(type(value), bool)
        return kind(found)

    def _value(
        self, node: Node, world: World, values: dict[Node, Any], stand_ins: dict[int, int]
    ) -> Any:
        if node.op == "placeholder":
            return getattr(world, str(node.target))
        if node.op == "get_attr":
            held = attribute(self.gm, str(node.target)).cpu()
            alone = self._held(node) if held.numel() == 1 else []
            return torch.full_like(held, _replaced(alone[0], stand_ins)) if alone else held

        def concrete(value: Any) -> Any:
            if isinstance(value, Node):
                return values[value] if value in values else self.number(value.meta["val"], world)
            if type(value) in (int, float):
                return _replaced(value, stand_ins)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, (list, tuple)):
                return type(value)(concrete(v) for v in value)
            return value

        if _is_like(node):
            value = node.meta["val"]
            sizes = [self.number(size, world) for size in value.shape]
            return torch.full(sizes, concrete(_filler(node)), dtype=value.dtype)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        kwargs = {name: concrete(value) for name, value in node.kwargs.items()}
        try:
            return target(*[concrete(value) for value in node.args], **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            raise Refusal(
                f"has a mask that {node.name} cannot compute for {world.rows} rows: {error}"
            ) from error

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
            value = attribute(self.gm, str(node.target))
            if isinstance(value, torch.nn.Parameter) or value.is_meta:
                raise Refusal(f"has a mask that depends on {node.target}; {ALLOWED_TEXT}")
        elif getattr(node.target, "__name__", "") == "getitem":
            return
        elif _name(node) not in ALLOWED:
            raise Refusal(f"has a mask that is made with {node.target}; {ALLOWED_TEXT}")
        elif _name(node) in PRODUCTS and sum(self._is_counted(a) for a in node.all_input_nodes) > 1:
            raise Refusal("has a mask that multiplies or divides rows by rows")
        elif _name(node) in EQUAL and any(abs(c) > SMALL for c in _acting(node)):
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


ALLOWED_TEXT = (
    "it may be made of index, positions, document, anchors, sizes and constants, compared and moved"
)


def _made_of(mask: Node) -> list[Node]:
    """All tensors behind a mask, in an order to compute them."""
    seen: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in seen or isinstance(node.meta.get("val"), NUMBERS):
            return
        for source in () if _is_like(node) else node.all_input_nodes:
            visit(source)
        seen[node] = None

    visit(mask)
    return list(seen)


def _name(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_numbering(node: Node) -> bool:
    """Whether numbers of rows begin here."""
    return (node.target if node.op == "placeholder" else _name(node)) in NUMBERING


def _is_like(node: Node) -> bool:
    """Whether a node is a constant that takes only its shape and type from a tensor."""
    return _name(node).partition("::")[2] in LIKE.split()


def _filler(node: Node) -> Any:
    """What such a constant holds."""
    if "full" not in _name(node):
        return int("ones" in _name(node))
    return argument(node, "fill_value")


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


def _replaced(value: float, stand_ins: dict[int, int]) -> float:
    """A number with the smaller one in its place, if there is one."""
    if abs(value) >= SENTINEL or value != value:
        return value
    whole = math.floor(abs(value))
    small = type(value)(stand_ins.get(whole, whole) + abs(value) - whole)
    return small if value >= 0 else -small


def _reach(number: float) -> int:
    """Rows that a number can act on as a summand, factor or divisor."""
    return math.ceil(max(abs(number), 1 / abs(number)))

"""Run nodes of a captured graph on small batches, in the process that compiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import attribute

from .mask_worlds import World
from .row_rules import Refusal, argument
from .sizes import Rows

LIKE = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
SENTINEL = 10**9
"""From here on a number means "to the end", or hides a key."""
NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class Evaluator:
    """Give nodes their values in a batch, on CPU."""

    def __init__(
        self,
        gm: GraphModule,
        *,
        double: bool = False,
        bodies: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        """Read a graph's sizes.

        Args:
            gm: the graph.
            double: every floating value is fp64, also where the graph casts.
            bodies: what runs instead of some operators.
        """
        self.gm, self.double, self.bodies = gm, double, bodies or {}
        self.sizes = Rows(gm.graph)

    def is_parameter(self, node: Node) -> bool:
        """Whether a get_attr node reads what is trained, or has no value yet."""
        value = attribute(self.gm, str(node.target))
        return isinstance(value, torch.nn.Parameter) or bool(value.is_meta)

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

    def shape(self, node: Node, world: World) -> list[int]:
        """Sizes of a node's tensor in a batch."""
        return [int(self.number(size, world)) for size in node.meta["val"].shape]

    def value(
        self, node: Node, world: World, values: Mapping[Node, Any], stand_ins: dict[int, int]
    ) -> Any:
        """Value of one node whose operands are known.

        Raises:
            Refusal: it cannot be computed.
        """
        if node.op == "placeholder":
            return getattr(world, str(node.target))
        if node.op == "get_attr":
            held = self._dtype_of(attribute(self.gm, str(node.target)).detach().cpu())
            if stand_ins and held.numel() == 1 and held.dtype != torch.bool:
                held = torch.full_like(held, replaced(held.item(), stand_ins))
            return held

        def concrete(value: Any) -> Any:
            if isinstance(value, Node):
                return values[value] if value in values else self.number(value.meta["val"], world)
            if type(value) in (int, float):
                return replaced(value, stand_ins)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, torch.dtype):
                return self._dtype(value)
            if isinstance(value, (list, tuple)):
                return type(value)(concrete(v) for v in value)
            return value

        if is_like(node):
            dtype = self._dtype(node.meta["val"].dtype)
            return torch.full(self.shape(node, world), concrete(_filler(node)), dtype=dtype)
        target: Any = self.bodies.get(node.target, node.target)
        kwargs = {name: concrete(value) for name, value in node.kwargs.items()}
        try:
            result = target(*[concrete(value) for value in node.args], **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            raise Refusal(
                f"needs {node.name}, which cannot be computed for {world.rows} rows: {error}"
            ) from error
        return self._dtype_of(result) if isinstance(result, Tensor) else result

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if self.double and dtype.is_floating_point else dtype

    def _dtype_of(self, x: Tensor) -> Tensor:
        return x.to(self._dtype(x.dtype))


def made_of(node: Node, known: Container[Node] = ()) -> list[Node]:
    """All tensors that a node is computed from, and itself, in an order to compute them, up to ``known``."""
    seen: dict[Node, None] = {}
    stack = [(node, False)]
    while stack:
        at, done = stack.pop()
        if done:
            seen[at] = None
        elif at not in seen and at not in known and not isinstance(at.meta.get("val"), NUMBERS):
            stack.append((at, True))
            stack += [(a, False) for a in (() if is_like(at) else reversed(at.all_input_nodes))]
    return list(seen)


def schema_name(node: Node) -> str:
    """Qualified name of an operator; empty for anything else."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def is_like(node: Node) -> bool:
    """Whether a node is a constant that takes only its shape and type from a tensor."""
    return schema_name(node).partition("::")[2] in LIKE.split()


def _filler(node: Node) -> Any:
    """What such a constant holds."""
    if "full" not in schema_name(node):
        return int("ones" in schema_name(node))
    return argument(node, "fill_value")


def replaced(value: float, stand_ins: dict[int, int]) -> float:
    """A number with the smaller one in its place, if there is one."""
    if abs(value) >= SENTINEL or value != value:
        return value
    whole = math.floor(abs(value))
    small = type(value)(stand_ins.get(whole, whole) + abs(value) - whole)
    return small if value >= 0 else -small

"""Numbers of documents in a mask: they are names, of which only the order and which are the same may matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from spec_compile.ir.edit import attribute

from .evaluator import SENTINEL, is_like, schema_name
from .row_rules import Refusal

MOVED = (
    "slice", "select", "narrow", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "expand", "expand_as",
    "broadcast_to", "roll", "flip", "unsqueeze", "squeeze", "transpose", "permute", "t", "mT", "movedim", "repeat",
    "tile", "repeat_interleave", "index", "index_select", "gather", "split", "chunk", "unbind", "to", "_to_copy",
    "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "type_as", "view_as",
)  # fmt: skip
SHAPED = ("expand_as", "view_as", "type_as")
"""These read no number of their second operand."""
JOINED = ("cat", "stack", "broadcast_tensors")
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "not_equal")
STRICT = ("lt", "less", "ge")
"""These may meet the smallest number itself: no document is below it."""
ONLY = (
    "has a mask that asks more of numbers of documents than which are the same and which come first; they differ with "
    "how documents are dealt: compare them with each other, or mark padding with -1 and ask for >= 0"
)


class Documents:
    """Follow numbers of documents through a mask, and refuse what depends on more than their order."""

    def __init__(self, gm: GraphModule) -> None:
        """Start with nothing known.

        Args:
            gm: the graph.
        """
        self.gm = gm
        self.smallest: dict[Node, int] = {}
        """What holds numbers of documents: that of the first; whatever is below marks padding."""
        self.differences: set[Node] = set()
        """What is 0 where two numbers are the same."""

    def check(self, node: Node) -> None:
        """Take one more node, whose operands have been taken.

        Raises:
            Refusal: it tells documents apart by their numbers.
        """
        if node.op == "placeholder" and node.target == "document":
            self.smallest[node] = 0
        if is_like(node) or not any(self._holds(a) for a in node.all_input_nodes):
            return
        if getattr(node.target, "__name__", "") == "getitem":
            self._keep(node, [node.args[0]])
            return
        name = schema_name(node).partition("::")[2]
        operands: list[Any] = [*node.args, *node.kwargs.values()][:2]
        truth = node.meta["val"].dtype == torch.bool if _is_tensor(node) else False
        if name in COMPARED:
            self._compare(name, operands)
        elif name == "logical_not" or (name in MOVED and truth):
            self._compare("eq", [operands[0], 0])
        elif name in SHAPED and not self._holds(operands[0]):
            return
        elif name in MOVED:
            if name not in SHAPED and any(map(self._holds, _nodes_in(node.args[1:]))):
                raise Refusal(ONLY)
            self._keep(node, [node.args[0]])
        elif name in JOINED:
            self._keep(node, list(node.args[0]))  # type: ignore[arg-type]
        elif name in ("where", "masked_fill"):
            self._keep(node, [*node.args[1:]] if name == "where" else [node.args[0], node.args[2]])
        else:
            self._count(name, node, operands)

    def _count(self, name: str, node: Node, operands: list[Any]) -> None:
        """Arithmetic that keeps the order of documents."""
        first, other = (*operands, None)[:2]
        known = [self.smallest.get(x) if isinstance(x, Node) else None for x in (first, other)]
        plain = not node.kwargs and len(node.args) <= 2
        apart = name == "sub" and plain and None not in known and known[0] == known[1]
        apart |= name == "diff" and plain and known[0] is not None and len(node.args) == 1
        if apart or (name in ("abs", "neg") and first in self.differences):
            self.differences.add(node)
        elif name in ("add", "sub") and plain and known[0] is not None and type(other) is int:
            self.smallest[node] = known[0] + (other if name == "add" else -other)
        elif name == "mul" and known.count(None) == 1:
            here = max(k for k in known if k is not None)
            truth = operands[known.index(None)]
            if here < 1 or not _is_tensor(truth) or truth.meta["val"].dtype != torch.bool:
                raise Refusal(ONLY)
            self.smallest[node] = here
        elif name in ("clamp", "clamp_min") and known[0] is not None and len(node.args) == 2:
            if self._value(other) > known[0]:
                raise Refusal(ONLY)
            self.smallest[node] = known[0]
        else:
            raise Refusal(ONLY)

    def _keep(self, node: Node, parts: list[Any]) -> None:
        """The parts are numbers of documents of one beginning, or marks below it."""
        found = {self.smallest[p] for p in parts if isinstance(p, Node) and p in self.smallest}
        others = [p for p in parts if not (isinstance(p, Node) and p in self.smallest)]
        if not found and all(isinstance(p, Node) and p in self.differences for p in parts):
            self.differences.add(node)
            return
        if len(found) != 1 or any(self._value(p) >= min(found) for p in others):
            raise Refusal(ONLY)
        self.smallest[node] = found.pop()

    def _compare(self, name: str, operands: list[Any]) -> None:
        """With each other, with 0 where they are differences, or with what no number is below."""
        first, other = operands
        if isinstance(first, Node) and first in self.differences:
            if self._value(other, at_least=True) == 0 == self._value(other):
                return
        elif isinstance(first, Node) and first in self.smallest:
            here = self.smallest[first]
            if isinstance(other, Node) and self.smallest.get(other) == here:
                return
            if self._value(other) < here + (name in STRICT):
                return
        elif isinstance(other, Node) and other in self.smallest:
            here = self.smallest[other]
            if self._value(first) < here + (name in ("le", "gt", "greater")):
                return
        raise Refusal(ONLY)

    def _holds(self, node: Node) -> bool:
        return node in self.smallest or node in self.differences

    def _value(self, value: Any, *, at_least: bool = False) -> float:
        """The largest of some constants, or the least; beyond all numbers if they are no constants."""
        if type(value) in (int, float):
            return float(value)
        if not isinstance(value, Node):
            return float(SENTINEL)
        if value.op == "get_attr":
            held = attribute(self.gm, str(value.target))
            if isinstance(held, Tensor) and held.numel() and not held.is_meta:
                return float((held.amin() if at_least else held.amax()).item())
        name = schema_name(value).partition("::")[2]
        if name in ("full", "full_like", "new_full", "scalar_tensor"):
            filler = value.kwargs.get("fill_value", value.args[-1])
            return self._value(filler, at_least=at_least)
        if name in ("zeros", "zeros_like", "new_zeros"):
            return 0.0
        if name in MOVED and isinstance(value.args[0], Node):
            return self._value(value.args[0], at_least=at_least)
        return float(SENTINEL)


def _nodes_in(value: Any) -> list[Node]:
    """All nodes in arguments, however deep."""
    if isinstance(value, (list, tuple)):
        return [node for part in value for node in _nodes_in(part)]
    return [value] if isinstance(value, Node) else []


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)

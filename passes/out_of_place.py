"""Turn writes into tensors into values of their own: what follows may merge, cut and move nodes freely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from spec_compile.errors import CaptureError
from spec_compile.ir.edit import call
from spec_compile.ir.meta import at_node

from .base import Cap, PassResult

aten = torch.ops.aten
NAME = "OutOfPlace"


@dataclass(frozen=True, slots=True)
class OutOfPlace:
    """``add_(x, y)`` becomes ``z = add(x, y)``, read by all that follows; writes through views are refused."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.REGIONS_INLINE})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        writes = [
            n for n in order if isinstance(n.target, OpOverload) and n.target._schema.is_mutable
        ]
        for node in writes:
            _rewrite(gm, node, order)
        return PassResult(gm, len(writes))


def _rewrite(gm: GraphModule, node: Node, order: dict[Node, int]) -> None:
    written = node.args[0]
    assert isinstance(written, Node)
    target = _functional(node)
    if target is None:
        raise CaptureError(
            at_node(node, "writes in place, which has no other spelling here; build a new tensor")
        )
    for other in _shares_memory(written, node, order):
        if other.op != "call_function":
            raise CaptureError(
                at_node(
                    node,
                    f"changes {other.target} in place; a training forward must not write into its ",
                )
                + "inputs, parameters or buffers: build a new tensor"
            )
        if other is not written and any(order[user] > order[node] for user in other.users):
            raise CaptureError(
                at_node(node, "writes into part of a tensor that is read later; ")
                + "build the tensor with torch.where, torch.cat or torch.stack"
            )
    value, dtype = node.meta["val"], written.meta["val"].dtype
    with gm.graph.inserting_before(node):
        new = call(gm.graph, target, node.args, like=node, origin=NAME, kwargs=dict(node.kwargs))
        tensors = (a.meta.get("val") for a in node.all_input_nodes)
        if any(isinstance(t, torch.Tensor) and t.dtype != dtype for t in tensors):
            new = call(gm.graph, aten.to.dtype, (new, dtype), like=node, origin=NAME, val=value)
    order[new] = order[node]
    for user in [u for u in written.users if order.get(u, -1) > order[node]]:
        user.replace_input_with(written, new)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _functional(node: Node) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``; None when there is no such form."""
    assert isinstance(node.target, OpOverload)
    space, _, name = node.target._schema.name.partition("::")
    packet = getattr(aten, name[:-1], None) if space == "aten" and name.endswith("_") else None
    found = getattr(packet, node.target._overloadname, None)
    return found if isinstance(found, OpOverload) else None


def _shares_memory(node: Node, before: Node, order: dict[Node, int]) -> set[Node]:
    """The node, what it is a view of, and all views of those that exist ``before`` a node."""
    stack, seen = [node], set()
    while stack:
        top = stack.pop()
        if top in seen:
            continue
        seen.add(top)
        stack += [*_viewed(top), *_same_result(top)]
        stack += [u for u in top.users if top in _viewed(u) and order[u] < order[before]]
    return seen


def _viewed(node: Node) -> Iterator[Node]:
    """Arguments whose memory a node's result may be."""
    if getattr(node.target, "__name__", "") == "getitem":
        if not _is_own_result(node):
            yield node.args[0]  # type: ignore[misc]
    elif isinstance(node.target, OpOverload) and not node.target._schema.is_mutable:
        schema = node.target._schema
        if any(r.alias_info is not None for r in schema.returns):
            for argument, value in zip(schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and isinstance(value, Node):
                    yield value


def _is_own_result(node: Node) -> bool:
    """Whether a getitem reads a tensor that its operator made for itself, as topk and sort do."""
    source = node.args[0]
    if not isinstance(source, Node) or not isinstance(source.target, OpOverload):
        return False
    return all(r.alias_info is None for r in source.target._schema.returns)


def _same_result(node: Node) -> Iterator[Node]:
    """Further getitems of the very same result."""
    if getattr(node.target, "__name__", "") == "getitem" and _is_own_result(node):
        source = node.args[0]
        assert isinstance(source, Node)
        yield from (user for user in source.users if user.args[:2] == node.args[:2])

"""Bring grad-mode and autocast regions into the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import CaptureError
from spec_compile.ir.edit import call
from spec_compile.ir.meta import at_node, source_line

from .base import Cap, PassResult

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InlineRegions:
    """``no_grad(body)(x)`` becomes ``detach(body(x))``; a disabled autocast region becomes its body."""

    requires: ClassVar[frozenset[Cap]] = frozenset()
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.REGIONS_INLINE})

    def __call__(self, gm: GraphModule) -> PassResult:
        changes = 0
        while region := next((n for n in gm.graph.nodes if _kind(n)), None):
            _inline(gm, region, detach=_kind(region) == "wrap_with_set_grad_enabled")
            changes += 1
        if changes:
            gm.graph.eliminate_dead_code()
            gm.recompile()
        return PassResult(gm, changes)


def _kind(node: Node) -> str:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast") else ""


def _inline(gm: GraphModule, region: Node, *, detach: bool) -> None:
    if detach:
        enabled, body, *inputs = region.args
        if enabled:
            raise CaptureError(
                f"{_line(gm, region, body)}\n  enable_grad inside no_grad is not supported; detach instead"
            )
    else:
        _device, _dtype, enabled, _cache, body, *inputs = region.args
        if enabled:
            raise CaptureError(
                f"{_line(gm, region, body)}\n  an autocast region inside the model is not supported; "
                "drop it and set Plan(param_dtype='bfloat16')"
            )
    assert isinstance(body, Node)
    inner: Any = gm.get_submodule(str(body.target))
    table: dict[Node, Any] = {}
    given = iter(inputs)
    with gm.graph.inserting_before(region):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                table[node] = next(given)
            elif node.op == "get_attr" and not isinstance(
                getattr(inner, str(node.target), None), GraphModule
            ):
                raise CaptureError(
                    at_node(node, "is a constant inside a grad-mode region: not supported; ")
                    + "make it before the region, or register it as a buffer"
                )
            elif node.op == "output":
                _replace_outputs(gm, region, node.args[0], table, detach=detach)
            elif node.op == "get_attr":
                name = f"{body.target}_{node.target}"
                gm.add_module(name, getattr(inner, str(node.target)))
                table[node] = gm.graph.get_attr(name)
            else:
                table[node] = gm.graph.node_copy(node, lambda n: table[n])
    gm.graph.erase_node(region)
    if not body.users:
        gm.graph.erase_node(body)


def _line(gm: GraphModule, region: Node, body: Any) -> str:
    """The user's line of a region, which itself has none where export made it: that of what it begins with."""
    inner: Any = gm.get_submodule(str(body.target))
    traced = (n for n in (region, *inner.graph.nodes) if not source_line(n).startswith("node "))
    return source_line(next(traced, region))


def _replace_outputs(
    gm: GraphModule, region: Node, results: Any, table: dict[Node, Any], *, detach: bool
) -> None:
    values = [table[r] if isinstance(r, Node) else r for r in results]
    for user in list(region.users):
        assert getattr(user.target, "__name__", "") == "getitem", "regions are read by getitem"
        value = values[user.args[1]]  # type: ignore[index]
        fake = value.meta.get("val")
        if detach and isinstance(fake, torch.Tensor) and fake.is_floating_point():
            value = call(
                gm.graph, aten.detach.default, (value,), like=value, origin="InlineRegions"
            )
        user.replace_all_uses_with(value)
        gm.graph.erase_node(user)

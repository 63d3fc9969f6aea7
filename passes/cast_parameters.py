"""Compute in another type than the parameters': cast them where the graph reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from spec_compile.ir.edit import attribute, call

from .base import Cap, PassResult


@dataclass(frozen=True, slots=True)
class CastParameters:
    """``W: f32`` read as bf16 becomes ``to(W, bf16)``; gradients arrive in the parameter's own type."""

    requires: ClassVar[frozenset[Cap]] = frozenset()
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        changes = 0
        for node in list(gm.graph.nodes):
            wanted = node.meta.get("val")
            if node.op != "get_attr" or not isinstance(wanted, torch.Tensor):
                continue
            value = attribute(gm, str(node.target))
            if not isinstance(value, torch.nn.Parameter) or value.dtype == wanted.dtype:
                continue
            first = next(n for n in gm.graph.nodes if n.op == "call_function")
            with gm.graph.inserting_before(first):
                cast = call(
                    gm.graph,
                    torch.ops.aten.to.dtype,
                    (node, wanted.dtype),
                    like=node,
                    origin="CastParameters",
                )
            node.replace_all_uses_with(
                cast, delete_user_cb=lambda user, cast=cast: user is not cast
            )
            node.meta["val"] = wanted.new_empty(wanted.shape, dtype=value.dtype)
            changes += 1
        return PassResult(gm, changes)

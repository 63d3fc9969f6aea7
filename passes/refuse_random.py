"""Refuse models that draw random numbers: recomputation, ratios and other ranks would see others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import ConfigError
from spec_compile.ir.meta import at_node

from .base import Cap, PassResult

DROPOUT = torch.ops.aten.dropout.default


@dataclass(frozen=True, slots=True)
class RefuseRandom:
    """``dropout(x, p, train=False)`` becomes ``x``; active dropout and random factories are refused."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.ATTENTION_DECLARED})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        changes = 0
        for node in list(gm.graph.nodes):
            if node.target == DROPOUT and (node.args[1] == 0 or not node.args[2]):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
                changes += 1
            elif _draws(node):
                raise ConfigError(
                    at_node(node, "draws random numbers; a training forward must not. ")
                    + "Set dropout to 0 (or call eval()), and give noise as a per-token field"
                )
        return PassResult(gm, changes)


def _draws(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    )

"""Leave rows out of a draft loss that a mask takes out of its sum: prompts cost nothing then."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from .base import Cap, PassResult

ops = torch.ops.spec_compile
aten = torch.ops.aten
WHERE = {aten.where.self, aten.where.ScalarOther}


@dataclass(frozen=True, slots=True)
class SkipMaskedRows:
    """``where(m, chunked_soft_cross_entropy(h, W, z, H), 0)`` hands ``m`` to the loss, which skips rows."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.LOSSES})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        changes = 0
        for node in list(gm.graph.nodes):
            if node.target is not ops.chunked_soft_cross_entropy.default:
                continue
            readers = _where_readers(node)
            masks = {mask for _, mask in readers}
            if len(masks) != 1:
                continue
            first = next(n for n in gm.graph.nodes if any(n is reader for reader, _ in readers))
            for moved in (node, *node.users):  # the mask is known before its first reader
                first.prepend(moved)
            node.args = (*node.args, masks.pop())
            changes += 1
        return PassResult(gm, changes)


def _where_readers(loss: Node) -> list[tuple[Node, Node]]:
    """All readers of a loss's outputs with their masks, when each is ``where(mask, output, .)``; else none."""
    readers: list[tuple[Node, Node]] = []
    for item in loss.users:
        if item.target is not operator.getitem:
            return []
        for reader in item.users:
            if reader.target not in WHERE or reader.args[1] is not item or item in reader.args[2:]:
                return []
            mask = reader.args[0]
            if not isinstance(mask, Node) or mask.meta["val"].shape != item.meta["val"].shape:
                return []
            readers.append((reader, mask))
    return readers

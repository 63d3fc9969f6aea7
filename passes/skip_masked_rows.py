"""Leave rows out of a draft loss that a mask takes out of its sum: prompts cost nothing then."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from .base import Cap, PassResult

ops = torch.ops.spec_compile
aten = torch.ops.aten
WHERE = {aten.where.self, aten.where.ScalarOther}


@dataclass(frozen=True, slots=True)
class SkipMaskedRows:
    """``where(m, chunked_soft_cross_entropy(h, W, z, H), 0)`` becomes the loss with ``m``, which skips rows."""

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
            node.args = (*node.args, *masks)
            for reader, mask in readers:
                _drop(reader, mask)
            changes += 1
        return PassResult(gm, changes)


def _drop(reader: Node, mask: Node) -> None:
    """Leave out a ``where(mask, x, 0)``: the loss has 0 there, and takes no gradient from there."""
    source, other = reader.args[1:]
    if other != 0 or isinstance(other, Node) or not isinstance(source, Node):
        return
    if source.meta["val"].dtype != reader.meta["val"].dtype:
        return
    if _false_at_dead_rows(mask):
        for user in list(reader.users):
            if user.target in WHERE and user.args[1:] == (reader, 0) and _is_alive(user.args[0]):
                user.replace_all_uses_with(reader)
                reader.graph.erase_node(user)
    reader.replace_all_uses_with(source)
    reader.graph.erase_node(reader)


def _whole(mask: Any) -> Any:
    """The full-frame value whose own rows these are."""
    sharded = isinstance(mask, Node) and mask.target is ops.shard_rows.default
    return mask.args[0] if sharded else mask


def _false_at_dead_rows(mask: Any) -> bool:
    """Whether a mask is False at dead rows: the batch's own, or one that was shifted."""
    mask = _whole(mask)
    if not isinstance(mask, Node):
        return False
    return mask.target in ("loss_mask", ops.shift_whole.default, ops.shift_rows.default)


def _is_alive(mask: Any) -> bool:
    """Whether a mask is ``index < live_rows``."""
    mask = _whole(mask)
    if not isinstance(mask, Node) or mask.target is not aten.lt.Scalar:
        return False
    return [getattr(_whole(a), "target", None) for a in mask.args] == ["index", "live_rows"]


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

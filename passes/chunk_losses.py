"""Compute log-probs and cross-entropies in chunks, so that logits never exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from spec_compile.ir.edit import call

from .base import Cap, PassResult

ops = torch.ops.spec_compile


@dataclass(frozen=True, slots=True)
class ChunkLosses:
    """``soft_cross_entropy(h, W, z, H)`` becomes ``chunked_soft_cross_entropy``; log-probs alike."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.SHARDED})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.LOSSES})

    def __call__(self, gm: GraphModule) -> PassResult:
        lowered = {
            ops.token_logprobs.default: ops.chunked_token_logprobs.default,
            ops.soft_cross_entropy.default: ops.chunked_soft_cross_entropy.default,
            ops.label_losses.default: ops.chunked_label_losses.default,
            ops.law_losses.default: ops.chunked_law_losses.default,
        }
        changes = 0
        for node in list(gm.graph.nodes):
            if node.target not in lowered:
                continue
            with gm.graph.inserting_before(node):
                new = call(
                    gm.graph, lowered[node.target], node.args, like=node, origin="ChunkLosses"
                )
            node.replace_all_uses_with(new)  # both forms give (first, second, ...) read by getitem
            gm.graph.erase_node(node)
            changes += 1
        return PassResult(gm, changes)

"""Anchors of block drafts: drawn document by document, and dealt to context-parallel ranks."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_compile.checked_batch import HOST, CheckedBatch

MIN_ANCHORS = 2
"""Fewest anchors of a rank: graphs are captured for sizes of at least 2."""


@dataclass(frozen=True)
class AnchorRule:
    """How many anchors a draft wants, and the plan's seed."""

    per_document: int
    seed: int


def draw_anchors(batch: CheckedBatch, rule: AnchorRule) -> Tensor:
    """Draw rows of each document without replacement, among those whose next token is a target.

    What is drawn depends on the document, the plan's seed and the batch's anchor seed alone: not on
    where the document lies, nor on what lies beside it.

    Returns:
        int64 [A], ascending; fewer than `AnchorRule.per_document` a document where it has no more.
    """
    tokens, mask = batch.tokens.numpy(), batch.draft_mask.numpy()
    found: list[int] = []
    bounds = itertools.accumulate(batch.lengths, initial=0)
    for start, end in itertools.pairwise(bounds):
        candidates = np.flatnonzero(mask[start + 1 : end])
        if len(candidates) > rule.per_document:
            hasher = hashlib.blake2b(f"{rule.seed} {batch.anchor_seed}|".encode(), digest_size=16)
            hasher.update(np.ascontiguousarray(tokens[start:end]).tobytes())
            key = int.from_bytes(hasher.digest(), "little")
            drawn = np.random.Generator(np.random.Philox(key=key)).random(end - start)
            first = np.argsort(drawn[candidates], kind="stable")[: rule.per_document]
            candidates = np.sort(candidates[first])
        found += (candidates + start).tolist()
    return torch.tensor(found, dtype=torch.int64, device=HOST)


def padded_anchors(anchors: Tensor, cp: int) -> Tensor:
    """Add unused anchors (-1), last, until all ranks have as many, and two or more: int64 [cp * a]."""
    each = max(MIN_ANCHORS, -(-anchors.shape[0] // cp))
    return torch.cat([anchors, anchors.new_full((cp * each - anchors.shape[0],), -1)])


def deal_anchors(anchors: Tensor, positions: Tensor, cp: int) -> Tensor:
    """Choose the anchor at each slot, int64 [A]: as many a rank, ascending there, of nearly equal work.

    An anchor's block sees the keys of its document in front of it, so its work grows with its position. They
    are dealt from the last position to the first, ranks taking turns forth and back.

    Args:
        anchors: int64 [A], packed rows, -1 for unused; A is a multiple of ``cp``.
        positions: int64 [T], of packed rows in their documents.
        cp: ranks.
    """
    inside = anchors.clamp(0, max(0, len(positions) - 1))
    work = anchors if not len(positions) else torch.where(anchors < 0, -1, positions[inside])
    turns = work.argsort(descending=True, stable=True).reshape(-1, cp)
    turns[1::2] = turns[1::2].flip(1)
    return turns.T.sort(1).values.reshape(-1)

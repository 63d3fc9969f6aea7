"""Anchors of block drafts: drawn document by document, and dealt to context-parallel ranks."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_compile.batch import CheckedBatch

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
    tokens, mask = batch.tokens.cpu().numpy(), batch.draft_mask.cpu().numpy()
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
    return torch.tensor(found, dtype=torch.int64, device=batch.tokens.device)


def padded_anchors(anchors: Tensor, cp: int) -> Tensor:
    """Add unused anchors (-1), last, until all ranks have as many, and two or more: int64 [cp * a]."""
    each = max(MIN_ANCHORS, -(-anchors.shape[0] // cp))
    return torch.cat([anchors, anchors.new_full((cp * each - anchors.shape[0],), -1)])


def deal_anchors(count: int, cp: int, device: torch.device) -> Tensor:
    """The anchor at each slot, int64 [count]: rank r takes anchors r, r + cp, ..., which evens out their work."""
    return torch.arange(count, device=device).reshape(-1, cp).T.reshape(-1)

"""Small batches on which a mask is evaluated: every packing of a few rows, and larger ones at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EVERY_PACKING = 5
"""All ways to pack up to so many rows are tried, and with anchors one row less."""
LARGER = 6
"""Larger batches, all of which have more rows than any constant of the mask acts on."""


@dataclass(frozen=True)
class World:
    """One packed row: what a mask may be made of. Anchors ascend; unused ones, -1, come last."""

    index: Tensor
    positions: Tensor
    document: Tensor
    anchors: Tensor

    @property
    def rows(self) -> int:
        """T."""
        return len(self.index)

    @property
    def used(self) -> Tensor:
        """Which anchors are used, bool [A]."""
        return self.anchors >= 0

    @property
    def anchor_document(self) -> Tensor:
        """int64 [A]; that of row 0 for unused anchors."""
        return self.document[self.anchors.clamp_min(0)]


def worlds(reach: int, *, anchored: bool) -> list[World]:
    """Batches for a mask whose constants act up to row ``reach``.

    The small ones hold every order in which rows, document ends and anchors can lie; the larger ones go beyond
    every constant. Zero-length documents leave gaps in the numbers.
    """
    return [*_small(anchored=anchored), *_larger(reach)]


def _small(*, anchored: bool) -> Iterator[World]:
    for total in range(2, EVERY_PACKING + (not anchored)):
        for cuts in itertools.product((False, True), repeat=total - 1):
            lengths = [1]
            for cut in cuts:
                lengths[-1:] = [lengths[-1], 1] if cut else [lengths[-1] + 1]
            if not anchored:
                yield _world(lengths, (0, -1), gap=sum(cuts) % 2)
                continue
            for number in range(total + 1):
                for chosen in itertools.combinations(range(total), number):
                    unused = max(2 - number, number % 2)
                    yield _world(lengths, (*chosen, *[-1] * unused), gap=sum(cuts) % 2)


def _larger(reach: int) -> Iterator[World]:
    draw = random.Random(0)
    for i in range(LARGER):
        total = 2 * reach + (11, 16, 23, 30, 37, 50)[i]
        longest = total if i % 2 else max(total // 4, 2)
        lengths: list[int] = []
        while (left := total - sum(lengths)) > 0:
            lengths.append(min(draw.randint(1, longest), left))
        chosen = sorted(draw.sample(range(total), min(total, 4 + i)))
        yield _world(lengths, (*chosen, *[-1] * (i % 3)), gap=i % 2)


def _world(lengths: Sequence[int], anchors: Sequence[int], *, gap: int) -> World:
    number = [d * (1 + gap) + gap for d, n in enumerate(lengths) for _ in range(n)]
    return World(
        index=torch.arange(sum(lengths)),
        positions=torch.tensor([t for n in lengths for t in range(n)]),
        document=torch.tensor(number),
        anchors=torch.tensor(anchors),
    )

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


def worlds(reach: int, *, anchored: bool, anchors: int = 1) -> list[World]:
    """Batches for a mask whose constants act up to row ``reach``, and up to anchor number ``anchors``.

    The small ones hold every order in which rows, document ends and anchors can lie; the larger ones go beyond
    every constant, in rows, in documents and in anchors, and in all of these at once. Zero-length documents leave
    gaps in the numbers.
    """
    beyond = _beyond(reach, anchors + 3 if anchored else 3)
    return [*_small(anchored=anchored), *beyond, *_larger(reach)]


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


def _beyond(reach: int, number: int) -> Iterator[World]:
    """Many documents before long ones, and after one, and one long document; each many anchors, used or not.

    A long document has two rows that are both beyond every constant, and as far from each other. ``number`` anchors
    lie in the documents that come first, as many in those behind.
    """
    long, short = 2 * reach + 7, [1 + (d % 4 == 3) for d in range(reach + 4)]
    for i, lengths in enumerate(([*short, long, reach + 5, 2, 1], [long, *short, reach + 5])):
        cut, total = sum(short) if i == 0 else long, sum(lengths)
        chosen = {*_spread(0, cut, number), *_spread(cut, total, number)}
        yield _world(lengths, (*sorted(chosen), *[-1] * (2 * i)), gap=i)
    total = 3 * reach + 11
    yield _world([total], (0, total // 2, total - 2, *[-1] * number), gap=0)


def _spread(first: int, last: int, number: int) -> range:
    """``number`` rows of those from ``first`` to ``last``, or all where there are less."""
    return range(first, last, max((last - first) // number, 1))


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

"""EAGLE-3's training-time test on one rank: all passes over the same main keys, as one graph.

Pass k attends to the main keys causally and to one diagonal key of each of the passes 1..k. Here as in a
step all passes' forwards run before the first backward, so the peak of memory is that of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.errors import ConfigError
from spec_compile.runtime.attention.backends import BACKENDS
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.fabric import Fabric
from spec_compile.runtime.layout import RowLayout

from .peers.usp import FabricGroup, Group, Usp
from .replay import ReplayFabric
from .shards import ContextAttention, Shape, random_rows
from .work import consumed


def needed_bytes(shape: Shape, rows: int, gathered_rows: int, passes: int) -> int:
    """What a rank must save: q, out, own keys and values, and lse of every pass; gathered ones once.

    Args:
        shape: of the attention.
        rows: of this rank.
        gathered_rows: main rows whose keys and values this rank holds as well; 0 where they only pass by.
        passes: of the training-time test.
    """
    item = shape.dtype.itemsize
    q = rows * shape.heads * shape.dim * item
    pair = 2 * shape.key_heads * shape.dim * item
    lse = rows * shape.heads * 4
    return passes * (2 * q + rows * pair + lse) + gathered_rows * pair


class Eagle3Rank:
    """All passes of one rank through the operator that a step calls.

    Args:
        shape: of the attention.
        layout: where the rows live.
        lengths: of the documents.
        fabric: the cp group; a `ReplayFabric` where this rank runs alone.
        device: where it runs.
        strategy: "ring", "all_gather" or "pass_q".
        backend: name of the attention backend.
        passes: of the training-time test.
    """

    def __init__(
        self, shape: Shape, layout: RowLayout, lengths: Sequence[int], fabric: Fabric,
        device: torch.device, *, strategy: str, backend: str, passes: int,
    ) -> None:  # fmt: skip
        self.device, self._fabric, self._strategy = device, fabric, strategy
        self._attention = ContextAttention(
            shape, layout, lengths, fabric.rank, device, strategy=strategy
        )
        self._context = RunContext({"cp": fabric}, options={"attention": backend})
        n = layout.rows_per_rank
        draw = torch.Generator(device=device).manual_seed(fabric.rank)
        self._queries = [random_rows(n, shape.heads, shape, draw) for _ in range(passes)]
        self._keys = [random_rows(n, shape.key_heads, shape, draw) for _ in range(passes)]
        self._values = [random_rows(n, shape.key_heads, shape, draw) for _ in range(passes)]
        self._grad = random_rows(n, shape.heads, shape, draw)

    def forward(self) -> list[Tensor]:
        """All passes; the main keys are exchanged as a lowered step exchanges them."""
        with bind(self._context):
            outs: list[Tensor] = []
            branches: tuple[list[Tensor], list[Tensor]] = ([], [])
            main: tuple[Tensor, Tensor] | None = None
            for xs in zip(self._queries, self._keys, self._values, strict=True):
                # a pass at a time, as a draft projects them: so the backward consumes their gradients
                q, k, v = (consumed(x) for x in xs)
                if main is None:
                    main = self._attention.main(k, v, self._fabric.size)
                else:
                    branches[0].append(k)
                    branches[1].append(v)
                outs.append(self._attention(q, *main, *(list(x) for x in branches)))
            return outs

    def backward(self, outs: list[Tensor]) -> None:
        """Last pass first, as the chain of passes demands."""
        with bind(self._context):
            torch.autograd.backward(outs, [self._grad] * len(outs))

    def sent_bytes(self) -> int:
        """Counted by a `ReplayFabric` alone."""
        return take_sent([self._fabric])


class UspRank:
    """All passes of one rank by the published procedure, one document.

    Args:
        shape: of the attention; ``repeat_heads`` expands its keys and values first.
        total: tokens of the document; a rank computes ceil(total / ranks) of them.
        ulysses: its group for the exchange of heads.
        ring: its group for the ring.
        device: where it runs.
        backend: name of the kernels of the tiles.
        passes: of the training-time test.
        repeat_heads: repeat keys and values to the query heads before they are cached, as NeMo Automodel does.
    """

    def __init__(
        self, shape: Shape, total: int, ulysses: Group, ring: Group,
        device: torch.device, *, backend: str, passes: int, repeat_heads: bool = False,
    ) -> None:  # fmt: skip
        self.device, self._fabrics = device, (ulysses, ring)
        self._usp = Usp(ulysses, ring, BACKENDS[backend], shape.dim**-0.5)
        self._usp.check(shape.heads, shape.heads if repeat_heads else shape.key_heads)
        self._repeats = shape.heads // shape.key_heads if repeat_heads else 1
        rows = -(-total // (ulysses.size * ring.size))
        draw = torch.Generator(device=device).manual_seed(ring.rank)
        self._queries = [random_rows(rows, shape.heads, shape, draw) for _ in range(passes)]
        self._keys = [random_rows(rows, shape.key_heads, shape, draw) for _ in range(passes)]
        self._values = [random_rows(rows, shape.key_heads, shape, draw) for _ in range(passes)]
        self._grad = random_rows(rows, shape.heads, shape, draw)

    def forward(self) -> list[Tensor]:
        """All passes."""
        cache: tuple[list[Tensor], list[Tensor]] = ([], [])
        outs = []
        for q, k, v in zip(self._queries, self._keys, self._values, strict=True):
            q, k, v = (consumed(x) for x in (q, k, v))
            if self._repeats > 1:
                k, v = (x.repeat_interleave(self._repeats, 1) for x in (k, v))
            outs.append(self._usp.attend(q, k, v, cache))
        return outs

    def backward(self, outs: list[Tensor]) -> None:
        """Last pass first."""
        torch.autograd.backward(outs, [self._grad] * len(outs))

    def sent_bytes(self) -> int:
        """Of both groups."""
        return take_sent(self._fabrics)


def splits(cp: int, shape: Shape, wanted: str) -> list[tuple[int, int]]:
    """Ulysses x ring sizes of ``cp`` ranks, the pure ring first.

    Args:
        cp: ranks.
        shape: its head counts limit the Ulysses part.
        wanted: "ring" for the pure ring alone, or "all".
    """
    if wanted not in ("ring", "all"):
        raise ConfigError(f"splits must be 'ring' or 'all', found {wanted!r}")
    sizes = [u for u in range(1, cp + 1) if cp % u == 0]
    sizes = [u for u in sizes if shape.heads % u == 0 and shape.key_heads % u == 0]
    return [(u, cp // u) for u in (sizes if wanted == "all" else sizes[:1])]


def take_sent(fabrics: Sequence[object]) -> int:
    """Bytes counted since the last call; the runtime's own fabrics count none."""
    total = 0
    for fabric in fabrics:
        if isinstance(fabric, ReplayFabric | FabricGroup):
            total += fabric.sent_bytes
            fabric.sent_bytes = 0
    return total


def pool_bytes(work: Eagle3Rank | UspRank) -> int:
    """Memory of the replayed values, which no rank of a real group holds."""
    fabrics = work._fabrics if isinstance(work, UspRank) else (work._fabric,)
    return sum(f.pool_bytes for f in fabrics if isinstance(f, ReplayFabric))

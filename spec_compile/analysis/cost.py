"""What a context-parallel attention moves, computes and takes, by strategy: the planner's cost model.

All figures are of one rank, evenly loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_compile.ir.traffic import RowBytes

from .hardware import H200, Hardware

STRATEGIES = ("ring", "all_gather", "pass_q")
CAUSAL_REACH = 0.75
"""In one zigzagged causal document: the rows of a rank's later chunk see keys of all ranks, those of its earlier
one of half of them."""


@dataclass(frozen=True)
class AttentionSize:
    """One attention over a packed row, all ranks together."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes of an element of q, k and v."""
    keys: int
    """Main keys."""
    queries: int
    """Query rows."""
    pairs: int
    """Visible (query, main key) pairs."""

    @classmethod
    def causal(
        cls,
        lengths: list[int] | tuple[int, ...],
        *,
        heads: int = 32,
        kv_heads: int = 8,
        head_dim: int = 128,
        value_dim: int | None = None,
        itemsize: int = 2,
    ) -> AttentionSize:
        """Every row of packed documents of these lengths attends causally inside its document."""
        rows = sum(lengths)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return cls(heads, kv_heads, head_dim, value_dim or head_dim, itemsize, rows, rows, pairs)

    @property
    def row_bytes(self) -> RowBytes:
        """What single rows weigh."""
        return RowBytes.of(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            value_dim=self.value_dim, itemsize=self.itemsize,
        )  # fmt: skip

    @property
    def flops(self) -> tuple[int, int]:
        """Forward and backward over all ranks: 2 and 5 products, 2 FLOPs each."""
        each = 2 * self.pairs * self.heads
        both = self.head_dim + self.value_dim
        return each * both, each * (2 * both + self.head_dim)


@dataclass(frozen=True)
class Predicted:
    """What one rank is expected to move, compute and take; forward and backward."""

    strategy: str
    forward_ms: float
    backward_ms: float
    bytes: int
    """Sent, forward and backward."""
    forward_bytes: int
    backward_bytes: int
    forward_compute_ms: float
    backward_compute_ms: float
    forward_exchange_ms: float
    """Of the link alone; what computing hides is not in ``forward_ms``."""
    backward_exchange_ms: float
    flops: int
    """Forward and backward."""
    held_bytes: int
    """Peak of foreign rows."""

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class _Direction:
    """Forward or backward of one strategy: how its exchange lies beside its tiles."""

    hidden: int
    """Bytes that travel while tiles are computed."""
    open: int
    """Bytes that nothing hides."""
    messages: int
    tiles: int
    memory: int
    """Bytes read and written beside the kernels: merges, sums of gradients, gathered copies."""

    @property
    def sent(self) -> int:
        return self.hidden + self.open


def predict(
    strategy: str,
    size: AttentionSize,
    cp: int,
    *,
    readers: int = 1,
    reach: float = CAUSAL_REACH,
    imbalance: float = 1.0,
    hardware: Hardware = H200,
) -> Predicted:
    """Predict one rank's attention under a strategy, for all ``readers`` together.

    Args:
        strategy: "ring", "all_gather" or "pass_q"; with ``cp`` 1 they are one.
        size: of one attention, all ranks together.
        cp: context-parallel ranks.
        readers: attentions that read the same main keys and values; one gather serves them all.
        reach: share of the other ranks whose keys a query row sees, on average; rows do not visit the others
            under "pass_q". Rows of documents that are whole on one rank: 0.
        imbalance: work of the busiest rank over the mean.
        hardware: rates to assume.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, found {strategy!r}")
    forward, backward = _directions(strategy, size, cp, readers, reach)
    flops = [readers * f // cp for f in size.flops]
    rates = (hardware.forward_tflops, hardware.backward_tflops)
    compute = [
        imbalance * f / rate / 1e9 + d.memory / hardware.memory_gb_s / 1e6
        + d.tiles * hardware.call_us / 1e3
        for f, rate, d in zip(flops, rates, (forward, backward), strict=True)
    ]  # fmt: skip
    times = [_time(d, c, hardware) for d, c in zip((forward, backward), compute, strict=True)]
    exchange = [
        d.sent / hardware.link_gb_s / 1e6 + d.messages * hardware.message_us / 1e3
        for d in (forward, backward)
    ]
    return Predicted(
        strategy=strategy,
        forward_ms=times[0],
        backward_ms=times[1],
        bytes=forward.sent + backward.sent,
        forward_bytes=forward.sent,
        backward_bytes=backward.sent,
        forward_compute_ms=compute[0],
        backward_compute_ms=compute[1],
        forward_exchange_ms=exchange[0],
        backward_exchange_ms=exchange[1],
        flops=sum(flops),
        held_bytes=_held(strategy, size, cp),
    )


def _time(direction: _Direction, compute_ms: float, hardware: Hardware) -> float:
    """Tiles and hops side by side, the first tile's data being here already; then what stays open."""
    hidden, opened = (
        sent / hardware.link_gb_s / 1e6 for sent in (direction.hidden, direction.open)
    )
    latency = direction.messages * hardware.message_us / 1e3
    if direction.hidden:
        return max(compute_ms, hidden + latency + compute_ms / direction.tiles) + opened
    return compute_ms + latency + opened


def _directions(
    strategy: str, size: AttentionSize, cp: int, readers: int, reach: float
) -> tuple[_Direction, _Direction]:
    keys, queries, others = size.keys // cp, size.queries // cp, cp - 1
    row = size.row_bytes
    parts = cp if strategy != "all_gather" else min(cp, 2)
    # a merge reads all partials and writes one; each tile's gradients are read and added to a wide sum
    merged = (parts + 1) * queries * row.partial if parts > 1 else 0
    summed = parts * queries * (2 * row.query_gradient + row.query)
    if strategy == "ring":
        # keys and values, in the backward their gradients too; there own keys come last, and nothing hides
        # the first hop
        there, back = others * keys * row.key, others * keys * row.key_gradient
        first = (others > 0) * keys * row.key
        summed += cp * keys * (3 * row.key_gradient + row.key)
        forward = _Direction(there, 0, others, parts, merged)
        backward = _Direction(there - first + back, first, 2 * others, parts, summed)
    elif strategy == "all_gather":
        shard, copied = others * keys * row.key, 2 * (others > 0) * cp * keys * row.key
        once = [_Direction(0, shard, int(others > 0), parts, m + copied) for m in (merged, summed)]
        return _times(once[0], readers, shard), _times(once[1], readers, shard)
    else:
        rows = int(others * reach * queries)
        there = rows * (row.query + row.partial)
        back = rows * (row.visitor + row.query_gradient)
        forward = _Direction(there, 0, 2 * others, parts, merged)
        backward = _Direction(back, 0, 2 * others, parts, summed)
    return _times(forward, readers), _times(backward, readers)


def _times(one: _Direction, readers: int, once: int = 0) -> _Direction:
    """Several readers' tiles; ``once`` bytes are sent once for all of them."""
    return _Direction(
        one.hidden * readers, once or one.open * readers,
        one.messages if once else one.messages * readers, one.tiles * readers, one.memory * readers,
    )  # fmt: skip


def _held(strategy: str, size: AttentionSize, cp: int) -> int:
    """Peak bytes of rows that other ranks own, forward."""
    shard = size.keys // cp * size.row_bytes.key
    if cp == 1:
        return 0
    if strategy == "ring":
        return 2 * shard
    if strategy == "all_gather":
        return (cp - 1) * shard
    return 2 * (size.queries // cp) * (size.row_bytes.query + size.row_bytes.partial)

"""What a context-parallel attention moves, computes and takes, by strategy: the planner's cost model.

Legend: cp ranks, n key rows and r query rows of each, H query heads, G key heads, D and E the head dims of
keys and values. All figures are of one rank, evenly loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .hardware import H200, Hardware

STRATEGIES = ("ring", "all_gather", "pass_q")
GRADIENT_BYTES = 4
"""Partial gradients travel and add up in fp32."""
LSE_BYTES = 4
CLOSE = 1.05
"""Predicted times up to this factor apart are not told apart."""


@dataclass(frozen=True)
class AttentionSize:
    """One attention over a packed row, all ranks together."""

    heads: int
    """H."""
    kv_heads: int
    """G."""
    head_dim: int
    """D."""
    value_dim: int
    """E."""
    itemsize: int
    """Bytes of an element of q, k and v."""
    keys: int
    """Main keys, cp * n."""
    queries: int
    """Query rows, cp * r."""
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
    reach: float = 1.0,
    imbalance: float = 1.0,
    hardware: Hardware = H200,
) -> Predicted:
    """Predict one rank's attention under a strategy, for all ``readers`` together.

    Args:
        strategy: "ring", "all_gather" or "pass_q"; with ``cp`` 1 they are one.
        size: of one attention, all ranks together.
        cp: context-parallel ranks.
        readers: attentions that read the same main keys and values; one gather serves them all.
        reach: share of the foreign ranks whose keys a query row sees; rows that see none there do not travel
            under "pass_q".
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
    hidden = direction.hidden / hardware.link_gb_s / 1e6
    hidden += direction.messages * hardware.message_us / 1e3 if direction.hidden else 0.0
    opened = direction.open / hardware.link_gb_s / 1e6
    if direction.open and not direction.hidden:
        opened += direction.messages * hardware.message_us / 1e3
    last = compute_ms / max(1, direction.tiles)
    return max(compute_ms, hidden + last if direction.hidden else 0.0) + opened


def _directions(
    strategy: str, size: AttentionSize, cp: int, readers: int, reach: float
) -> tuple[_Direction, _Direction]:
    keys, queries, item = size.keys // cp, size.queries // cp, size.itemsize
    row_kv = size.kv_heads * (size.head_dim + size.value_dim)
    q_row, out_row = size.heads * size.head_dim, size.heads * size.value_dim
    others = cp - 1
    parts = cp if strategy != "all_gather" else min(cp, 2)
    # a merge reads all partials and writes one; gradients add up in fp32
    merged = (parts + 1) * queries * out_row * item if parts > 1 else 0
    summed = parts * queries * q_row * (2 * GRADIENT_BYTES + item)
    if strategy == "ring":
        # keys and values, in the backward their gradients too, of which the last hop home is not hidden
        ring = others * keys * row_kv * item
        grads = (others > 0) * keys * row_kv * GRADIENT_BYTES
        summed += cp * keys * row_kv * (3 * GRADIENT_BYTES + item)
        return (
            _Direction(readers * ring, 0, readers * others, readers * parts, readers * merged),
            _Direction(readers * (ring + others * grads), readers * grads, readers * 2 * others,
                       readers * parts, readers * summed),
        )  # fmt: skip
    if strategy == "all_gather":
        shard = keys * row_kv * item
        copied = 2 * (others > 0) * cp * shard
        return (
            _Direction(0, others * shard, int(others > 0), readers * parts, readers * (merged + copied)),
            _Direction(0, others * shard, int(others > 0), readers * parts, readers * (summed + copied)),
        )  # fmt: skip
    rows = int(others * reach * queries)
    there = rows * q_row * item
    back = rows * (out_row * item + size.heads * LSE_BYTES)
    again = rows * ((q_row + out_row) * item + 2 * size.heads * LSE_BYTES)
    grads = rows * q_row * GRADIENT_BYTES
    return (
        _Direction(
            readers * (there + back), 0, readers * 2 * others, readers * parts, readers * merged
        ),
        _Direction(
            readers * (again + grads), 0, readers * 2 * others, readers * parts, readers * summed
        ),
    )


def _held(strategy: str, size: AttentionSize, cp: int) -> int:
    """Peak bytes of rows that other ranks own, forward."""
    shard = size.keys // cp * size.kv_heads * (size.head_dim + size.value_dim) * size.itemsize
    if cp == 1:
        return 0
    if strategy == "ring":
        return 2 * shard
    if strategy == "all_gather":
        return (cp - 1) * shard
    row = size.heads * (size.head_dim + size.value_dim) * size.itemsize + size.heads * LSE_BYTES
    return 2 * (size.queries // cp) * row


@dataclass(frozen=True)
class Choice:
    """How one attention is exchanged, and why."""

    strategy: str
    reason: str
    predicted: dict[str, Predicted]
    """By strategy. Of a gather that serves several attentions, this one's share."""


def choose(sizes: Sequence[AttentionSize], cp: int, hardware: Hardware = H200) -> list[Choice]:
    """Choose for the attentions that read one pair of main keys and values.

    Times within `CLOSE` of each other count as equal: then the fewest bytes win. A gathered copy stays until
    the backward, so a gather is a choice only where it serves several attentions, and then it serves all.
    """
    readers = len(sizes)
    predicted = [
        {
            name: _share(predict(name, size, cp, readers=readers, hardware=hardware), readers)
            for name in STRATEGIES
        }
        for size in sizes
    ]
    apart = [_best([p["ring"], p["pass_q"]]) for p in predicted]
    together = [p["all_gather"] for p in predicted]
    if readers > 1 and _best([_total(apart), _total(together)]).strategy == "all_gather":
        reason = f"one gather serves {readers} attentions"
        return [Choice("all_gather", reason, p) for p in predicted]
    reasons = {
        "ring": "fewer bytes than query rows, and no copy of all keys is kept",
        "pass_q": "query rows and their gradients are fewer bytes than keys and values",
    }
    return [
        Choice(best.strategy, reasons[best.strategy], p)
        for best, p in zip(apart, predicted, strict=True)
    ]


def _best(found: Sequence[Predicted]) -> Predicted:
    fastest = min(p.total_ms for p in found)
    close = [p for p in found if p.total_ms <= CLOSE * fastest]
    return min(close, key=lambda p: (p.bytes, p.total_ms))


def _share(whole: Predicted, readers: int) -> Predicted:
    """One of several equal attentions that were predicted together."""
    parts: dict[str, Any] = {
        field.name: value / readers if isinstance(value, float) else value // readers
        for field in fields(Predicted)
        if not isinstance(value := getattr(whole, field.name), str) and field.name != "held_bytes"
    }
    return replace(whole, **parts)


def _total(parts: Sequence[Predicted]) -> Predicted:
    """Several attentions one after the other, under the first one's name."""
    numbers = [f.name for f in fields(Predicted) if f.name not in ("strategy", "held_bytes")]
    sums: dict[str, Any] = {name: sum(getattr(p, name) for p in parts) for name in numbers}
    return replace(parts[0], **sums, held_bytes=max(p.held_bytes for p in parts))

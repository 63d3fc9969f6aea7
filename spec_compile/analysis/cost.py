"""Bytes and FLOPs of context-parallel attention, per 1024 tokens of the packed row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeCost:
    """What one strategy moves and holds on each rank for one key/value tensor pair."""

    sent_bytes: int
    """Forward, for all attentions that share the pair."""
    held_bytes: int
    """Peak of foreign keys and values."""
    messages: int


def exchange_costs(
    *,
    cp: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    readers: int,
    tokens: int = 1024,
) -> dict[str, ExchangeCost]:
    """Cost of "ring" and "all_gather" when ``readers`` attentions read the same keys and values.

    A ring sends the pair once for every reader and holds two shards; one gather serves all readers
    but holds the whole pair.
    """
    shard = tokens // cp * kv_heads * (head_dim + value_dim) * itemsize
    return {
        "ring": ExchangeCost(readers * (cp - 1) * shard, 2 * shard, readers * (cp - 1)),
        "all_gather": ExchangeCost((cp - 1) * shard, cp * shard, 1),
    }


def choose(costs: dict[str, ExchangeCost], readers: int) -> tuple[str, str]:
    """Strategy and the reason, as a sentence with its figures."""
    ring, gather = costs["ring"], costs["all_gather"]
    if readers > 1:
        return "all_gather", (
            f"one gather serves {readers} attentions: {gather.sent_bytes / 1024:.0f} KiB sent per 1k tokens "
            f"instead of {ring.sent_bytes / 1024:.0f} by ring"
        )
    return "ring", (
        f"equal bytes ({ring.sent_bytes / 1024:.0f} KiB sent per 1k tokens), holds {ring.held_bytes / 1024:.0f} KiB "
        f"of keys and values instead of {gather.held_bytes / 1024:.0f}"
    )

"""Choose a strategy for attentions over the same keys, by what the cost model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from spec_compile.ir.traffic import EITHER

from .cost import STRATEGIES, AttentionSize, Predicted, predict
from .hardware import H200, Hardware

CLOSE = 1.05
"""Predicted times up to this factor apart are not told apart."""


@dataclass(frozen=True)
class Choice:
    """How one attention is exchanged, and why."""

    strategy: str
    reason: str
    predicted: dict[str, Predicted]
    """By strategy. Of a gather that serves several attentions, this one's share."""
    planned: str
    """The strategy that the predicted row is given."""


def choose(sizes: Sequence[AttentionSize], cp: int, hardware: Hardware = H200) -> list[Choice]:
    """Choose for the attentions that read one pair of main keys and values.

    Times within `CLOSE` of each other count as equal: then the fewest bytes win. A gathered copy stays until
    the backward, so a gather is a choice only where it serves several attentions, and then it serves all.
    What is not gathered goes by ring or by visits, whichever sends fewer bytes: that depends on documents and
    anchors, so each micro-batch decides anew (`runtime.attention.visits.fewest_bytes`).
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
        return [Choice("all_gather", reason, p, "all_gather") for p in predicted]
    reason = "whichever sends fewer bytes in a micro-batch"
    return [
        Choice(EITHER, f"{reason}, here {best.strategy}", p, best.strategy)
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

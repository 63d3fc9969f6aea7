"""Counts of what the engine did since they were last read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Stats:
    """Sums over sequences and rounds."""

    def __init__(self, max_drafted: int) -> None:
        self._max_drafted = max_drafted
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.tokens = 0
        self.seconds = 0.0
        self.verify_steps = 0
        self.drafted = [0] * self._max_drafted
        self.accepted = [0] * self._max_drafted
        self.rounds = [0] * (self._max_drafted + 1)

    def count_round(
        self, num_sequences: int, drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Add one round: drafted and accepted tokens by position."""
        self.verify_steps += num_sequences
        self.rounds[len(drafted)] += 1
        for j, (num_drafted, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
            self.drafted[j] += num_drafted
            self.accepted[j] += num_accepted

    def read(self) -> dict[str, Any]:
        """Give all sums and start anew."""
        values = {
            "verify_steps": self.verify_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "draft_tokens": self.rounds,
        }
        self.reset()
        return values

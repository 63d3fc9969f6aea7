"""What a step of the bridge measured."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftResult:
    """Filled when `MegatronDraft.step` ends; the same on every rank."""

    draft_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

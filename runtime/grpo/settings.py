"""What a GRPO step does."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_compile.errors import ConfigError

from ..rollout.params import SamplingParams
from ..policy_loss import PolicyLoss
from .loss import DapoLoss


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Choices of a `Trainer`."""

    sampling: SamplingParams
    """Its ``n`` is the group size."""
    loss: PolicyLoss = field(default_factory=DapoLoss)
    updates: int = 1
    """Optimizer steps a set of rollouts."""
    train_draft: bool = True
    max_grad_norm: float = 1.0
    """Of the policy and, by itself, of the draft."""
    mask_truncated: bool = False
    """Leave completions that the length limit cut out of the policy loss."""

    def __post_init__(self) -> None:
        if self.sampling.n < 2:
            raise ConfigError(
                "GRPO compares the completions of one prompt: sampling.n must be 2 or more, "
                f"found {self.sampling.n}"
            )
        if self.updates < 1:
            raise ConfigError(f"updates must be 1 or more, found {self.updates}")

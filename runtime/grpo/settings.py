"""What a GRPO step does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from spec_compile.errors import ConfigError
from spec_compile.options import refuse_unknown

from ..policy_loss import PolicyLoss
from ..rollout.params import SamplingParams
from .loss import DapoLoss

_SAMPLING, _LOSS = "put it into sampling=SamplingParams(..)", "put it into loss=DapoLoss(..)"
ELSEWHERE = {
    **{option.name: _SAMPLING for option in fields(SamplingParams)},
    **{option.name: _LOSS for option in fields(DapoLoss)},
    "num_generations": "it is sampling.n",
    "max_completion_length": "it is sampling.max_tokens",
    "num_iterations": "it is updates",
    "epsilon": "it is clip_low of loss=DapoLoss(..)",
    "epsilon_high": "it is clip_high of loss=DapoLoss(..)",
    "beta": "there is no term against a reference model; a loop of one's own gives its log-probs to the batch's "
    "fields, and adds the term in the policy loss",
    "learning_rate": "give it to the optimizer",
}
"""Options of other parts, and of other trainers."""


@refuse_unknown(ELSEWHERE)
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
        if isinstance(self.updates, bool) or not isinstance(self.updates, int) or self.updates < 1:
            raise ConfigError(f"updates must be an int of 1 or more, found {self.updates!r}")
        if not callable(self.loss):
            raise ConfigError(f"loss must be a function of rows, found {self.loss!r}")
        for name in ("train_draft", "mask_truncated"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be a bool, found {getattr(self, name)!r}")
        limit = self.max_grad_norm
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise ConfigError(f"max_grad_norm must be a number above 0, found {limit!r}")

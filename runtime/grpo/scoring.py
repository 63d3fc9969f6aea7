"""Rewards of completions by the user's function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_compile.errors import ConfigError

from .exchange import Scored

RewardFunction = Callable[..., Sequence[float]]
"""``reward_fn(prompts, completions, **columns) -> list[float]``, lists with one entry a completion."""


@dataclass(frozen=True)
class Scorer:
    """Calls a reward function with TRL's signature."""

    reward_fn: RewardFunction
    tokenizer: Any = None
    """Makes texts of ids; without one the function is given the ids."""

    def check(self, columns: Mapping[str, Sequence[Any]], num_prompts: int) -> None:
        """Refuse columns that have not one entry a prompt.

        Raises:
            ConfigError: naming the column.
        """
        for name, column in columns.items():
            if len(column) != num_prompts:
                raise ConfigError(
                    f"column {name!r} needs one entry a prompt, {num_prompts}, found {len(column)}"
                )

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        found: Sequence[Scored],
    ) -> list[Scored]:
        """Give each completion its reward.

        Raises:
            ConfigError: the function did not return one finite number a completion.
        """
        if not found:
            return []
        which = [one.rollout.prompt_index for one in found]
        ids = [one.rollout.tokens for one in found]
        rewards = self.reward_fn(
            [self._text(prompts[i]) for i in which],
            [self._text(tokens) for tokens in ids],
            completion_ids=ids,
            **{name: [column[i] for i in which] for name, column in columns.items()},
        )
        if len(rewards) != len(found) or not all(math.isfinite(float(r)) for r in rewards):
            raise ConfigError(
                f"reward_fn must return one finite number a completion, {len(found)} in all; "
                f"found {list(rewards)!r}"
            )
        pairs = zip(found, rewards, strict=True)
        return [Scored(one.rollout, float(reward)) for one, reward in pairs]

    def _text(self, ids: Sequence[int]) -> Any:
        if self.tokenizer is None:
            return list(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=True)

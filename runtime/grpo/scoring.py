"""Rewards of completions by the user's function."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_compile.errors import ConfigError

from ..rollout.params import Rollout

RewardFunction = Callable[..., Sequence[float]]
"""``reward_fn(prompts, completions, **columns) -> list[float]``, lists with one entry a completion."""

FIRST = ("prompts", "completions")
"""Given by place."""
OWN_ARGUMENTS = (*FIRST, "completion_ids")


@dataclass(frozen=True)
class Scorer:
    """Calls a reward function with TRL's signature, or with what its own takes of it."""

    reward_fn: RewardFunction
    tokenizer: Any = None
    """Makes texts of ids; without one the function is given the ids."""

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        rollouts: Sequence[Rollout],
    ) -> list[float]:
        """Give each completion its reward.

        Raises:
            ConfigError: a column has not one entry a prompt, the function needs an argument that there is
                not, or it did not return one finite number a completion.
        """
        _check_columns(columns, len(prompts))
        if not rollouts:
            return []
        which = [one.prompt_index for one in rollouts]
        ids = [one.tokens for one in rollouts]
        given = {
            "prompts": [self._text(prompts[i]) for i in which],
            "completions": [self._text(tokens) for tokens in ids],
            "completion_ids": ids,
            **{name: [column[i] for i in which] for name, column in columns.items()},
        }
        args, named = _taken(self.reward_fn, given)
        return _numbers(self.reward_fn(*args, **named), len(rollouts))

    def _text(self, ids: Sequence[int]) -> Any:
        if self.tokenizer is None:
            return list(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def _taken(reward_fn: RewardFunction, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by place and by name: prompts and completions come first, the others where they are taken.

    A function that has one of its first two parameters from another place is called by name alone.
    """
    try:
        signature = inspect.signature(reward_fn)
    except (TypeError, ValueError):  # not of Python; it gets everything
        signature = inspect.signature(lambda *args, **columns: None)
    parameters = signature.parameters.values()
    places = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD][:2]
    if any(own in given and own != due for own, due in zip(places, FIRST, strict=False)):
        args, named = [], given
    else:
        args, named = (
            [given[due] for due in FIRST],
            {n: v for n, v in given.items() if n not in FIRST},
        )
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        named = {name: value for name, value in named.items() if name in signature.parameters}
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise ConfigError(
            f"reward_fn{signature} cannot be called with what there is, {', '.join(given)}: {error}; give it these "
            "parameters, or pass what it lacks as a column"
        ) from error
    return args, named


def _check_columns(columns: Mapping[str, Sequence[Any]], num_prompts: int) -> None:
    if not isinstance(columns, Mapping):
        raise ConfigError(f"columns must map names to lists, found {type(columns).__name__}")
    for name, column in columns.items():
        if name in OWN_ARGUMENTS:
            raise ConfigError(f"reward_fn is given {name!r} anyway; give the column another name")
        if not hasattr(column, "__len__") or len(column) != num_prompts:
            found = len(column) if hasattr(column, "__len__") else repr(column)
            raise ConfigError(
                f"column {name!r} needs one entry a prompt, {num_prompts}, found {found}"
            )


def _numbers(rewards: Any, count: int) -> list[float]:
    """Read a list, tuple, array or tensor of ``count`` finite numbers."""
    listed = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if isinstance(listed, (list, tuple)) and len(listed) == count:
        values = [float(one) for one in listed if isinstance(one, numbers.Real)]
        if len(values) == count and all(math.isfinite(value) for value in values):
            return values
    raise ConfigError(
        f"reward_fn must return a list with one finite number a completion, {count} in all; found {rewards!r}"
    )

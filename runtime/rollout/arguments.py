"""Check what a caller passes to the engine, before anything runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from spec_compile.errors import BatchError, ConfigError

from .params import SamplingParams
from .scalars import listed, whole


def at_least(name: str, value: Any, low: int) -> int:
    """Check an int and its lower limit.

    Raises:
        ConfigError: names it.
    """
    try:
        number = whole(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise ConfigError(f"{name} must be an int of at least {low}, found {value!r}")
    return number


def checked_prompts(prompts: Any, max_model_len: int, num_embeddings: int) -> list[list[int]]:
    """Check prompts; gives them as lists of ints.

    Raises:
        BatchError: they are no list of lists of known token ids, or one is empty or too long.
    """
    try:
        items = listed(prompts)
    except TypeError as error:
        raise BatchError(f"prompts must be a list of lists of token ids: {error}") from error
    checked = []
    for index, prompt in enumerate(items):
        try:
            ids = [whole(token) for token in listed(prompt)]
        except TypeError as error:
            raise BatchError(f"prompt {index} must be a list of token ids: {error}") from error
        if not ids:
            raise BatchError(f"prompt {index} is empty; expected at least one token")
        if len(ids) >= max_model_len:
            raise BatchError(
                f"prompt {index} has {len(ids)} tokens, which leaves no room for a completion in "
                f"max_model_len={max_model_len}"
            )
        bad = next((token for token in ids if not 0 <= token < num_embeddings), None)
        if bad is not None:
            raise BatchError(
                f"prompt {index} holds token {bad}; expected 0 to {num_embeddings - 1}"
            )
        checked.append(ids)
    return checked


def checked_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Check sampling parameters; gives those of each prompt.

    Raises:
        BatchError: there are more or fewer than prompts.
        ConfigError: something else came in their place.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    try:
        items = listed(params)
    except TypeError as error:
        raise ConfigError(
            f"params must be SamplingParams, or a list with those of each prompt: {error}"
        ) from error
    if len(items) != num_prompts:
        raise BatchError(f"{num_prompts} prompts came with {len(items)} SamplingParams")
    for index, one in enumerate(items):
        if not isinstance(one, SamplingParams):
            raise ConfigError(f"params[{index}] must be SamplingParams, found {one!r}")
    return items


def checked_places(only: Any, total: int) -> list[int]:
    """Check the places of a share of ``prompts x n``.

    Raises:
        ConfigError: they are no ints, out of range, double, or out of order.
    """
    expected = f"only must list distinct places in prompts x n, ascending, from 0 to {total - 1}"
    try:
        places = [whole(place) for place in listed(only)]
    except TypeError as error:
        raise ConfigError(f"{expected}: {error}") from error
    for place in places:
        if not 0 <= place < total:
            raise ConfigError(f"{expected}; found {place}")
    for before, after in pairwise(places):
        if before >= after:
            raise ConfigError(f"{expected}; found {after} after {before}")
    return places

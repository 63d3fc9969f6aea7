"""The arguments of a call: checked on every rank, and written so that equal ones compare equal."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from spec_compile.errors import ConfigError


def checked_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as JSON-able values, numbers as floats.

    Raises:
        ConfigError: a number is not one, not finite, or out of range.
    """
    return {name: _CHECKS.get(name, _as_is)(name, value) for name, value in arguments.items()}


def _as_is(name: str, value: Any) -> Any:
    return value


def _number(name: str, value: Any) -> float | None:
    if value is None and name != "temperature":
        return None
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
    above = name == "temperature"
    if (
        not math.isfinite(number)
        or (above and number <= 0)
        or (name == "denominator" and number < 0)
    ):
        raise ConfigError(
            f"{name} must be a finite number{' above 0' if above else ''}, found {value!r}"
        )
    return number


def _counts(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        counts = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} must be a number or one a step of the draft, found {value!r}"
        ) from error
    if counts.ndim > 1 or not bool((counts.isfinite() & (counts >= 0)).all()):
        raise ConfigError(f"{name} must hold finite numbers of at least 0, found {value!r}")
    return counts.tolist()


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, found {value!r}")
    return value


_CHECKS = {
    "temperature": _number,
    "denominator": _number,
    "draft_weight": _number,
    "draft_denominator": _counts,
    "train_draft": _flag,
}

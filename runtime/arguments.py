"""The arguments of a call: checked on every rank, and written so that equal ones compare equal."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spec_compile.errors import ConfigError, did_you_mean


def checked_arguments(
    arguments: Mapping[str, Any], draft_steps: int | None = None
) -> dict[str, Any]:
    """Return the arguments as JSON-able values, numbers as floats.

    Args:
        arguments: by name.
        draft_steps: length of the draft's vector of counts; None when it is a scalar.

    Raises:
        ConfigError: one is of a wrong type, not finite, out of range, or of a wrong length.
    """
    checked = {name: _CHECKS.get(name, _as_is)(name, value) for name, value in arguments.items()}
    if checked.get("draft_denominator") is not None:
        checked["draft_denominator"] = _one_a_step(checked["draft_denominator"], draft_steps)
    return checked


def checked_limit(name: str, limit: Any) -> float | None:
    """Return the largest norm of a group of gradients; None measures only, infinity is fine.

    Raises:
        ConfigError: it is not a number above 0.
    """
    if limit is None:
        return None
    number = _real(limit)
    if math.isnan(number) or number <= 0:
        raise ConfigError(
            f"clip_grad_norm_ needs a number above 0 for {name}, or None to measure only; found {limit!r}"
        )
    return number


def _as_is(name: str, value: Any) -> Any:
    return value


def _real(value: Any) -> float:
    """The number as a float; NaN for anything that is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of float
        return math.nan


def _number(name: str, value: Any) -> float | None:
    if value is None and name != "temperature":
        return None
    number = _real(value)
    above = name == "temperature"
    if (
        not math.isfinite(number)
        or (above and number <= 0)
        or (name == "denominator" and number < 0)
    ):
        raise ConfigError(f"{name} must be a finite number{_RANGES.get(name, '')}, found {value!r}")
    return number


def _counts(name: str, value: Any) -> Any:
    """Floats, alone or in a list, whatever they came in."""
    if value is None:
        return None
    try:
        kind = torch.as_tensor(value).dtype
        counts = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"{name} must be a number or one a step of the draft, found {value!r}"
        ) from error
    numeric = kind != torch.bool and not kind.is_complex
    if counts.ndim > 1 or not numeric or not bool((counts.isfinite() & (counts >= 0)).all()):
        raise ConfigError(f"{name} must hold finite numbers of at least 0, found {value!r}")
    return counts.tolist()


def _one_a_step(counts: Any, steps: int | None) -> Any:
    """Fit the divisors to the draft's counts: a scalar, or a vector of ``steps``."""
    listed = counts if isinstance(counts, list) else [counts] * (steps or 1)
    if len(listed) != (steps or 1):
        wanted = "one number" if steps is None else f"a number or a list of {steps}, one a step"
        raise ConfigError(
            f"draft_denominator must be {wanted}, as counts() gives for this draft; found {len(listed)} numbers"
        )
    return listed[0] if steps is None else listed


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, found {value!r}")
    return value


def _policy_loss(name: str, value: Any) -> bool:
    """Losses cannot be compared across ranks; whether there is one can."""
    if value is not None and not callable(value):
        raise ConfigError(
            f"{name} must be a function of rows, or None to train the draft alone; found {type(value).__name__}"
        )
    return value is not None


_RANGES = {"temperature": " above 0", "denominator": " of at least 0"}
_CHECKS = {
    "policy_loss": _policy_loss,
    "temperature": _number,
    "denominator": _number,
    "draft_weight": _number,
    "draft_denominator": _counts,
    "train_draft": _flag,
}


def check_options(groups: Mapping[str, object], unknown: Iterable[str]) -> None:
    """Refuse options of optimizer groups that are no mapping, or that name no group.

    Raises:
        ConfigError: says how options are given.
    """
    shape = "expected param_groups(policy={'lr': 1e-6}, draft={'lr': 1e-5})"
    for name in unknown:
        near = did_you_mean(name, groups)
        raise ConfigError(f"{shape}, found {name!r}{near or '; put it into the dict of a group'}")
    for name, options in groups.items():
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(
                f"{shape}, found {name}={options!r}; put it into a dict under its name"
            )


def named_groups_error(found: Sequence[object]) -> ConfigError:
    """What a limit says that does not name its group."""
    given = ", ".join(map(repr, found))
    return ConfigError(
        f"clip_grad_norm_ clips each group to its own norm, found {given} for none of them; name them: "
        "clip_grad_norm_(policy=1.0, draft=1.0)"
    )


def frozen_refusal(call: str, target: nn.Module) -> ConfigError | None:
    """The error of a policy loss that no parameter of the target, on any rank, could learn from."""
    if any(parameter.requires_grad for parameter in target.parameters()):
        return None
    return ConfigError(
        f"{call} was given a policy_loss, but no parameter of {type(target).__name__} requires a gradient, so the "
        "policy cannot learn from it; set requires_grad_(True) on what is to learn before parallelize, or pass "
        "policy_loss=None to train the draft alone"
    )

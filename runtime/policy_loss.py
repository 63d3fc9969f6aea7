"""The user's policy loss: called on one micro-batch, and held to what it may return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.contract import TokenOutputs
from spec_compile.errors import ConfigError

PolicyLoss = Callable[[TokenOutputs], Any]
OWN_KEYS = "step/"
"""What the library's own metrics begin with."""


@dataclass(frozen=True)
class PolicyOutcome:
    """What a policy loss gave for one micro-batch."""

    loss: float
    named: dict[str, float]
    gradients: tuple[Tensor | None, Tensor | None]
    """Of the loss by log-probs and entropies, [T] each; None where it does not depend on them."""


def call_policy_loss(policy_loss: PolicyLoss, rows: TokenOutputs) -> PolicyOutcome:
    """Call the loss on whole documents and differentiate it by the rows.

    Args:
        policy_loss: the user's; anything that it raises passes through.
        rows: whose log-probs and entropies are leaves that require gradients.

    Raises:
        ConfigError: it returned something else than a finite sum (and named finite sums) of the rows.
    """
    logprobs, entropy = rows.logprobs, rows.entropy
    learns = bool(rows.mask.any())
    with torch.enable_grad():
        loss, named = _parts(policy_loss(rows))
    value = _scalar(loss)
    sums = {name: _named_sum(name, item) for name, item in named.items()}
    gradients: tuple[Tensor | None, ...] = (None, None)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss.reshape(()), (logprobs, entropy), allow_unused=True)
    if learns and all(gradient is None for gradient in gradients):
        raise ConfigError(
            "policy_loss returned a loss that does not depend on rows.logprobs or rows.entropy (detached, or computed "
            "under no_grad?), so the policy cannot learn from it; return a sum of them (times 0 for no loss), or pass "
            "policy_loss=None to train the draft alone"
        )
    return PolicyOutcome(value, sums, (gradients[0], gradients[1]))


def add_named(sums: dict[str, float], name: str, value: float) -> None:
    """Accumulate a named sum; names ending in /max or /min keep the extreme."""
    if name not in sums:
        sums[name] = value
    elif name.endswith("/max"):
        sums[name] = max(sums[name], value)
    elif name.endswith("/min"):
        sums[name] = min(sums[name], value)
    else:
        sums[name] += value


def _parts(returned: Any) -> tuple[Tensor, Mapping[Any, Any]]:
    loss: Any = returned
    named: Any = {}
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise ConfigError(f"{_EXPECTED}, found a tuple of {len(returned)}")
        loss, named = returned
    if not isinstance(loss, Tensor):
        raise ConfigError(f"{_EXPECTED}, found {type(loss).__name__} as the loss")
    if not isinstance(named, Mapping):
        raise ConfigError(f"{_EXPECTED}, found {type(named).__name__} as the named sums")
    return loss, named


def _scalar(loss: Tensor) -> float:
    if loss.numel() != 1 or loss.is_complex():
        raise ConfigError(
            f"{_EXPECTED}, found a loss of shape {list(loss.shape)} and {loss.dtype}; sum it over the micro-batch"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ConfigError(
            f"policy_loss returned {value}; it must return a finite sum over the micro-batch"
        )
    return value


def _named_sum(name: Any, item: Any) -> float:
    if not isinstance(name, str):
        raise ConfigError(
            f"policy_loss: names of sums must be str, found {name!r} ({type(name).__name__})"
        )
    if name.startswith(OWN_KEYS):
        raise ConfigError(
            f"policy_loss: names that begin with {OWN_KEYS!r} are the library's own, found {name!r}; choose another"
        )
    if isinstance(item, Tensor):
        if item.numel() != 1 or item.is_complex():
            raise ConfigError(
                f"policy_loss: the named sum {name!r} must be a scalar, found shape {list(item.shape)} and "
                f"{item.dtype}; sum it over the micro-batch"
            )
        value = float(item.detach())
    elif isinstance(item, numbers.Real):
        value = float(item)
    else:
        raise ConfigError(
            f"policy_loss: the named sum {name!r} must be a scalar tensor or a number, found {type(item).__name__}"
        )
    if not math.isfinite(value) and value != _neutral(name):
        raise ConfigError(f"policy_loss: the named sum {name!r} must be finite, found {value}")
    return value


def _neutral(name: str) -> float | None:
    """The extreme of no rows at all, which is not finite."""
    return {"/max": -math.inf, "/min": math.inf}.get(name[-4:])


_EXPECTED = "policy_loss must return a scalar tensor, or (scalar tensor, {name: sum})"

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

from .readback import Readback

PolicyLoss = Callable[[TokenOutputs], Any]
OWN_KEYS = "step/"
"""What the library's own metrics begin with."""


@dataclass(frozen=True)
class PolicyOutcome:
    """What a policy loss gave for one micro-batch."""

    sums: Readback
    """The loss, then the named sums."""
    names: tuple[str, ...]
    gradients: tuple[Tensor | None, Tensor | None]
    """Of the loss by log-probs and entropies, [T] each; None where it does not depend on them."""

    def read(self) -> tuple[float, dict[str, float]]:
        """Wait for the loss and the named sums.

        Raises:
            ConfigError: one is not finite.
        """
        loss, *values = self.sums.numbers()
        if not math.isfinite(loss):
            raise ConfigError(
                f"policy_loss returned {loss}; it must return a finite sum over the micro-batch"
            )
        for name, value in zip(self.names, values, strict=True):
            if not math.isfinite(value) and value != _neutral(name):
                raise ConfigError(
                    f"policy_loss: the named sum {name!r} must be finite, found {value}"
                )
        return loss, dict(zip(self.names, values, strict=True))


def call_policy_loss(policy_loss: PolicyLoss, rows: TokenOutputs) -> PolicyOutcome:
    """Call the loss on whole documents and differentiate it by the rows, without waiting for the device.

    Args:
        policy_loss: the user's; anything that it raises passes through.
        rows: whose log-probs and entropies are leaves that require gradients.

    Raises:
        ConfigError: it returned something else than a scalar (and named scalars).
    """
    leaves, mask = (rows.logprobs, rows.entropy), rows.mask  # a loss may replace those of its rows
    with torch.enable_grad():
        loss, named = _parts(policy_loss(rows))
    _check_scalar(loss)
    sums = {_checked_name(name): _named_sum(name, item) for name, item in named.items()}
    gradients: tuple[Tensor | None, ...] = (None, None)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    if all(gradient is None for gradient in gradients) and bool(mask.any()):
        raise ConfigError(
            "policy_loss returned a loss that does not depend on rows.logprobs or rows.entropy (detached, or computed "
            "under no_grad?), so the policy cannot learn from it; return a sum of them (times 0 for no loss), or pass "
            "policy_loss=None to train the draft alone"
        )
    values = [loss.reshape(()), *sums.values()]
    return PolicyOutcome(Readback(values), tuple(sums), (gradients[0], gradients[1]))


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


def _check_scalar(loss: Tensor) -> None:
    if loss.numel() != 1 or loss.is_complex():
        raise ConfigError(
            f"{_EXPECTED}, found a loss of shape {list(loss.shape)} and {loss.dtype}; sum it over the micro-batch"
        )


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigError(
            f"policy_loss: names of sums must be str, found {name!r} ({type(name).__name__})"
        )
    if name.startswith(OWN_KEYS):
        raise ConfigError(
            f"policy_loss: names that begin with {OWN_KEYS!r} are the library's own, found {name!r}; choose another"
        )
    return name


def _named_sum(name: str, item: Any) -> Tensor:
    if isinstance(item, Tensor):
        if item.numel() != 1 or item.is_complex():
            raise ConfigError(
                f"policy_loss: the named sum {name!r} must be a scalar, found shape {list(item.shape)} and "
                f"{item.dtype}; sum it over the micro-batch"
            )
        return item.detach().reshape(())
    if isinstance(item, numbers.Real):
        return torch.tensor(float(item), dtype=torch.float64, device="cpu")
    raise ConfigError(
        f"policy_loss: the named sum {name!r} must be a scalar tensor or a number, found {type(item).__name__}"
    )


def _neutral(name: str) -> float | None:
    """The extreme of no rows at all, which is not finite."""
    return {"/max": -math.inf, "/min": math.inf}.get(name[-4:])


_EXPECTED = "policy_loss must return a scalar tensor, or (scalar tensor, {name: sum})"

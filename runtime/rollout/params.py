"""What a caller asks of the engine and what it gets back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from spec_compile.errors import ConfigError
from spec_compile.options import refuse_unknown

from .scalars import real, whole

MIN_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1

FinishReason = Literal["stop", "length"]


@refuse_unknown(
    {
        "logprobs": "every Rollout has them",
        "do_sample": "temperature=0 is greedy, anything above samples",
    }
)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn: temperature, then top-k, then top-p.

    Raises:
        ConfigError: a value is out of range or of the wrong type.
    """

    n: int = 1
    """Completions a prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep exactly this many of the likeliest tokens (of equal ones the lowest ids); 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to and with the one that makes their sum reach this."""
    max_tokens: int = 256
    """Longest completion, the stop token included."""
    stop_token_ids: tuple[int, ...] | None = None
    """None: the end tokens of the target's generation config; (): none."""
    ignore_eos: bool = False
    """Do not stop at the generation config's end tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they stay in it. Needs the engine's tokenizer."""
    seed: int | None = None
    """Makes a sample a function of weights, prompt and (seed, prompt index, sample index)."""

    def __post_init__(self) -> None:
        self._set("n", _whole("n", self.n, 1))
        self._set("top_k", _whole("top_k", self.top_k, 0))
        self._set("max_tokens", _whole("max_tokens", self.max_tokens, 1))
        self._set("temperature", _number("temperature", self.temperature))
        self._set("top_p", _number("top_p", self.top_p))
        if self.temperature != 0 and not self.temperature >= MIN_TEMPERATURE:
            raise ConfigError(
                f"SamplingParams: temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, "
                f"found {self.temperature!r}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"SamplingParams: top_p must be in (0, 1], found {self.top_p!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(
                f"SamplingParams: ignore_eos must be a bool, found {self.ignore_eos!r}"
            )
        if self.seed is not None:
            self._set("seed", _whole("seed", self.seed, 0, MAX_SEED))
        if self.stop_token_ids is not None:
            ids = _listed("stop_token_ids", self.stop_token_ids)
            self._set("stop_token_ids", tuple(_whole("stop_token_ids", one, 0) for one in ids))
        texts = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"SamplingParams: stop holds non-empty texts, found {text!r}")
        self._set("stop", texts)

    def _set(self, name: str, value: Any) -> None:
        """Keep the plain Python value of what came."""
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Rollout:
    """One sampled completion."""

    prompt_index: int
    tokens: list[int]
    """Without the prompt; the stop token included."""
    logprobs: list[float]
    """The target's under the sampling distribution; of softmax(logits) when temperature is 0."""
    finish_reason: FinishReason
    weight_version: int
    """Of the policy's weights."""


def _whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    try:
        number = whole(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"SamplingParams: {name} must be an int {limits}, found {value!r}")
    return number


def _number(name: str, value: Any) -> float:
    try:
        number = real(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"SamplingParams: {name} must be a finite number, found {value!r}")
    return number


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
        try:
            return tuple(value)
        except TypeError:  # an array or tensor without dimensions
            pass
    raise ConfigError(f"SamplingParams: {name} must be a tuple, found {value!r}")

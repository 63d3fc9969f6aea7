"""One running completion: its tokens, when it ends, and what its draft has not read yet."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .params import FinishReason, SamplingParams

SPARE_CHARACTERS = 16


class StopText:
    """Finds stop strings in a growing list of tokens, reading only the end of it."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._needed = max(map(len, stop)) + SPARE_CHARACTERS
        self._first = 0

    def found(self, tokens: list[int]) -> bool:
        """Whether the newest token completed a stop string."""
        text = self._text(tokens[self._first :])
        if any(stop in text for stop in self._stop):
            return True
        middle = (self._first + len(tokens)) // 2
        if (
            middle - self._first > SPARE_CHARACTERS
            and len(self._text(tokens[middle:])) > self._needed
        ):
            self._first = middle
        return False

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


@dataclass
class Sequence:
    """A prompt and its completion so far."""

    prompt_index: int
    sample_index: int
    prompt: list[int]
    params: SamplingParams
    key: int
    """Of its random numbers."""
    stop_tokens: frozenset[int]
    stop_text: StopText | None
    max_new_tokens: int
    slot: int = -1
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    trunk_rows: int = 0
    """Rows that the draft has read."""
    unread: list[Tensor] = field(default_factory=list)
    """Features [t, m * D_t] of the rows after those."""

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self.max_new_tokens - len(self.completion)

    @property
    def last_token(self) -> int:
        """The newest token, which the target has not read."""
        return self.completion[-1]

    @property
    def num_unread(self) -> int:
        """Rows that the draft has not read."""
        return self.length - 1 - self.trunk_rows

    def unread_tokens(self) -> list[int]:
        """The token after each unread row."""
        first = self.trunk_rows + 1 - len(self.prompt)
        if first >= 0:
            return self.completion[first:]
        return self.prompt[first:] + self.completion

    def extend(self, tokens: Items[int], logprobs: Items[float]) -> int:
        """Take new tokens up to the end of the completion; returns how many."""
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), 1):
            self.completion.append(token)
            self.logprobs.append(logprob)
            if token in self.stop_tokens or (
                self.stop_text is not None and self.stop_text.found(self.completion)
            ):
                self.finish_reason = "stop"
                return count
            if not self.remaining:
                self.finish_reason = "length"
                return count
        return len(tokens)

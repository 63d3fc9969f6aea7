"""The engine's own copy of a draft: a cached chain decoder over the target's features.

Row ``s`` of the trunk reads token ``s + 1`` and the target's features at ``s``; its output proposes
token ``s + 2``. A chain goes on from the last row with the draft's own state in place of features,
and its rows are overwritten when the target's features of those positions are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError

from .arguments import at_least
from .attention import attend
from .cache import KVCache, PackedRows
from .serving import own_copy

DEFAULT_STEPS = 3
"""Drafted tokens of a draft that does not say how many it was trained for (``ttt_length``)."""

Attend = Callable[..., Tensor]
"""``attend(q, k, v, *, scale=None, window=None, sinks=None)``: [n, Hq, D], [n, Hkv, D], [n, Hkv, Dv] ->
[n, Hq, Dv]. Each row attends to its own sequence up to itself. Each call in a step has a cache of its own."""


class ServableDraft(Protocol):
    """What a draft needs, besides its training forward, to be served by the engine."""

    taps: tuple[int, ...]

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features, [n, m * D_t], to the state [n, D] that starts a chain."""

    def step(
        self, state: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Advance n rows: state [n, D] and embedded tokens [n, D_t] -> next state, output [n, D]."""

    def logits(self, output: Tensor) -> Tensor:
        """Map outputs of `step`, [n, D], to logits [n, V] over the target's vocabulary."""


class ServedDraft:
    """Runs a draft over the slots of the engine."""

    def __init__(
        self,
        draft: nn.Module,
        embed: Callable[[Tensor], Tensor],
        vocab_size: int,
        *,
        last_position: int,
    ) -> None:
        """Copy a draft.

        Args:
            draft: a `ServableDraft`.
            embed: gives the rows of the target's embedding.
            vocab_size: of the target.
            last_position: the highest that the draft is asked for; later rows, which nobody will look at,
                are given this one.

        Raises:
            ConfigError: it cannot be served; says what it lacks.
        """
        check_servable(draft)
        steps = getattr(draft, "ttt_length", DEFAULT_STEPS)
        self.trained_steps = at_least(f"{type(draft).__name__}.ttt_length", steps, 1)
        self.model, self.complete = own_copy(draft)
        self.cache = KVCache()
        self._last_position = last_position
        self._draft: Any = self.model
        self._embed, self._vocab_size = embed, vocab_size

    def feed(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Tensor,
        features: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Append trunk rows.

        Args:
            slots: one a sequence.
            starts: position of each sequence's first new row.
            tokens: int64 [T], the token after each row's own position, sequence after sequence.
            features: [t, m * D_t] of each sequence, T rows in all.

        Returns:
            State and output [B, D] of each sequence's last row.
        """
        rows = PackedRows(slots, starts, [len(part) for part in features], tokens.device)
        fused = self._rows("fuse", self._draft.fuse(torch.cat(list(features))), len(tokens))
        state, output = self._step(fused, tokens, rows)
        last = rows.last_rows
        return state[last], output[last]

    def advance(
        self, slots: Sequence[int], positions: Sequence[int], tokens: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take one chain step of each sequence: tokens int64 [B], state [B, D] -> state, output."""
        return self._step(
            state, tokens, PackedRows(slots, positions, [1] * len(slots), tokens.device)
        )

    def logits(self, output: Tensor) -> Tensor:
        """Logits [B, V].

        Raises:
            ConfigError: they are no logits, or over another vocabulary than the target's.
        """
        logits = self._rows("logits", self._draft.logits(output), len(output))
        if logits.shape[-1] != self._vocab_size:
            raise ConfigError(
                f"{type(self.model).__name__}.logits gives {logits.shape[-1]} tokens, the target has "
                f"{self._vocab_size}; give tokens that the draft does not know -inf"
            )
        return logits

    def _step(self, state: Tensor, tokens: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        self.cache.reserve(*rows.room)
        layer = -1

        def cached(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            nonlocal layer
            layer += 1
            return attend(self.cache, layer, rows, q, k, v, **options)

        positions = rows.position.clamp_max(self._last_position)
        result = self._draft.step(state, self._embed(tokens), positions, cached)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ConfigError(
                f"{type(self.model).__name__}.step must return (state, output), found {_described(result)}"
            )
        state, output = (self._rows("step", part, len(tokens)) for part in result)
        return state, output

    def _rows(self, method: str, value: Any, count: int) -> Tensor:
        """Check that a method of the draft gave a row for each row it read."""
        if not isinstance(value, Tensor) or not value.ndim or len(value) != count:
            raise ConfigError(
                f"{type(self.model).__name__}.{method} must return tensors of as many rows as it read ({count}), "
                f"found {_described(value)}"
            )
        return value


def check_servable(draft: nn.Module) -> None:
    """Refuse a draft without the methods of `ServableDraft`.

    Raises:
        ConfigError: names what it lacks.
    """
    lacks = [
        name for name in ("fuse", "step", "logits") if not callable(getattr(draft, name, None))
    ]
    if not isinstance(getattr(draft, "taps", None), (tuple, list)):
        lacks.append("taps")
    if lacks:
        raise ConfigError(
            f"{type(draft).__name__} cannot be served: it lacks {', '.join(lacks)}. A served draft has taps, "
            "fuse(features) -> state, step(state, embedded, positions, attend) -> (state, output) and "
            "logits(output); train it without the engine, or serve the target alone (draft=None)"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"

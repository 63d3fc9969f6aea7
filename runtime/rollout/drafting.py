"""What the engine asks of a draft: three protocols, and what its copies of them have in common.

A chain drafts token after token from its own state. A parallel draft drafts all in one causal pass, with
masks for the tokens that are not known. A block draft fills slots that see each other behind the target's
features. Legend: B sequences, T new rows, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError

from .arguments import at_least
from .attention import attend
from .cache import KVCache, PackedRows
from .serving import own_copy

DEFAULT_STEPS = 3
"""Drafted tokens of a draft that does not say how many it was trained for."""

Attend = Callable[..., Tensor]
"""``attend(q, k, v, *, scale=None, window=None, sinks=None)``: [n, Hq, D], [n, Hkv, D], [n, Hkv, Dv] ->
[n, Hq, Dv]. Each row attends to its own sequence up to itself, a slot of a block to its whole block and
all in front of it. Each call in a step has a cache of its own."""


class ServableDraft(Protocol):
    """A chain: row ``s`` reads token ``s + 1`` and the features at ``s``, and proposes token ``s + 2``.

    Optional attributes: ``num_draft_tokens`` (or ``ttt_length``), how many it was trained for;
    ``reads_hidden`` True, for the target's hidden states after its final norm in place of the taps;
    ``logits`` may be left out where the target's own head reads the output.
    """

    taps: tuple[int, ...]

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features, [n, m * D_t], to the state [n, D] that starts a chain."""

    def step(
        self, state: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Advance n rows: state [n, D] and embedded tokens [n, D_t] -> next state, output [n, D]."""

    def logits(self, output: Tensor) -> Tensor:
        """Map outputs of `step`, [n, D], to logits [n, V] over the target's vocabulary."""


class ParallelDraft(Protocol):
    """Rows as a chain's; behind the last one, masked rows propose the tokens after its."""

    taps: tuple[int, ...]
    config: Any
    """Has ``mask_token_id``, which masked rows read."""
    mask_hidden: Tensor
    """[1, 1, m * D_t]: the features that masked rows read."""
    served_as: str
    """Says "parallel"."""

    def fuse(self, features: Tensor) -> Tensor:
        """Map features, [n, m * D_t], to states [n, D]."""

    def run(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run n rows, states [n, D] and embedded tokens [n, D_t], to outputs [n, D]."""


class BlockDraft(Protocol):
    """Slots at the newest token's position and behind it: that token, then masks."""

    taps: tuple[int, ...]
    config: Any
    """Has ``mask_token_id``, which masked slots read."""
    block_size: int
    first_slot: int
    """Slot ``first_slot`` proposes the next token, the slots behind it the tokens after that."""
    served_as: str
    """Says "block"."""

    def trunk(self, features: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values, [n, Hkv, D] each, that each layer has of features [n, m * D_t]."""

    def fill(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run n slots, embedded tokens [n, D_t], to outputs [n, D]."""


NEEDED = {
    "chain": ("fuse", "step", "logits"),
    "parallel": ("fuse", "run"),
    "block": ("trunk", "fill"),
}
CHAIN_FORM = (
    "A served draft has taps, fuse(features) -> state, step(state, embedded, positions, attend) -> "
    "(state, output) and logits(output)"
)


@dataclass(frozen=True)
class TargetEnds:
    """What drafts share with their target."""

    embed: Callable[[Tensor], Tensor]
    """ids [..] -> rows of the input embedding."""
    head: Callable[[Tensor], Tensor]
    """hidden states [n, D_t] -> logits [n, V]."""
    vocab_size: int


@dataclass(frozen=True)
class Unread:
    """Rows of the target that a draft has not read, sequence after sequence."""

    slots: Sequence[int]
    starts: Sequence[int]
    """Position of each sequence's first unread row."""
    tokens: Tensor
    """int64 [T]: the token after each row's own position."""
    features: Sequence[Tensor]
    """[t, m * D_t] of each sequence, T rows in all."""

    @property
    def counts(self) -> list[int]:
        """Rows of each sequence."""
        return [len(part) for part in self.features]

    @property
    def ends(self) -> list[int]:
        """Position behind each sequence's last unread row: that of its newest token."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def last_tokens(self) -> Tensor:
        """int64 [B]: each sequence's newest token."""
        return self.tokens[torch.tensor(self.counts).cumsum(0).to(self.tokens.device) - 1]


class DraftRound(Protocol):
    """Proposals of one round, left to right."""

    def confidence(self, previous: Tensor) -> Tensor | None:
        """Foretold chance [B] that the next token is accepted; None for drafts that do not say.

        Args:
            previous: int64 [B], the token in front of it.
        """

    def logits(self, previous: Tensor) -> Tensor:
        """Logits [B, V] of the next token behind ``previous``; each call is one token further."""


class ServedDraft:
    """A draft's own copy, its cache, and the checks of what it gives; subclasses know the protocols."""

    longest: ClassVar[bool] = False
    """No more tokens can be drafted than it was trained for."""

    def __init__(self, draft: nn.Module, ends: TargetEnds, *, last_position: int) -> None:
        """Copy a draft.

        Args:
            draft: obeys one of the protocols.
            ends: of the target.
            last_position: the highest that the draft is asked for; later rows, which nobody will look at,
                are given this one.

        Raises:
            ConfigError: it cannot be served; says what it lacks.
        """
        check_servable(draft)
        self.trained_steps = trained_steps(draft)
        self.model, self.complete = own_copy(draft)
        self.cache = KVCache()
        self._last_position, self._ends = last_position, ends
        self._draft: Any = self.model

    def read(self, unread: Unread) -> None:
        """Take rows in without drafting."""
        raise NotImplementedError

    def draft(self, unread: Unread, number: int) -> DraftRound:
        """Take rows in, and start to draft ``number`` tokens behind each sequence's newest one."""
        raise NotImplementedError

    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, V], by the draft's head or the target's.

        Raises:
            ConfigError: they are no logits, or over another vocabulary than the target's.
        """
        own = getattr(self._draft, "logits", None)
        logits = self._ends.head(output) if own is None else own(output)
        logits = self._rows("logits", logits, len(output))
        if logits.shape[-1] != self._ends.vocab_size:
            raise ConfigError(
                f"{type(self.model).__name__}.logits gives {logits.shape[-1]} tokens, the target has "
                f"{self._ends.vocab_size}; give tokens that the draft does not know -inf"
            )
        return logits

    def _positions(self, rows: PackedRows) -> Tensor:
        return rows.position.clamp_max(self._last_position)

    def _attend(self, rows: PackedRows, ahead: int = 0) -> Attend:
        """Attention over the cache for one pass: the n-th call belongs to the n-th layer.

        Args:
            rows: of the pass.
            ahead: tokens drafted before it; windows are counted from the row that the chain started at.
        """
        self.cache.reserve(*rows.room)
        layer = -1

        def cached(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            nonlocal layer
            layer += 1
            if options.get("window") is not None:
                options["window"] += ahead
            return attend(self.cache, layer, rows, q, k, v, **options)

        return cached

    def _rows(self, method: str, value: Any, count: int) -> Tensor:
        """Check that a method of the draft gave a row for each row it read."""
        if not isinstance(value, Tensor) or not value.ndim or len(value) != count:
            raise ConfigError(
                f"{type(self.model).__name__}.{method} must return tensors of as many rows as it read ({count}), "
                f"found {described(value)}"
            )
        return value


def served_as(draft: nn.Module) -> str:
    """Name the protocol of a draft: "chain" unless it says another."""
    return str(getattr(draft, "served_as", "chain"))


def trained_steps(draft: nn.Module) -> int:
    """Tokens that a draft was trained to draft in a round."""
    for name in ("num_draft_tokens", "ttt_length"):
        if hasattr(draft, name):
            return at_least(f"{type(draft).__name__}.{name}", getattr(draft, name), 1)
    return DEFAULT_STEPS


def check_servable(draft: nn.Module) -> None:
    """Refuse a draft that obeys none of the protocols.

    Raises:
        ConfigError: names what it lacks.
    """
    kind = served_as(draft)
    if kind not in NEEDED:
        raise ConfigError(
            f"{type(draft).__name__}.served_as must be one of {', '.join(NEEDED)}, found {kind!r}"
        )
    needed = NEEDED[kind]
    if getattr(draft, "reads_hidden", False):
        needed = tuple(name for name in needed if name != "logits")
    lacks = [name for name in needed if not callable(getattr(draft, name, None))]
    if not isinstance(getattr(draft, "taps", None), (tuple, list)):
        lacks.append("taps")
    if lacks:
        raise ConfigError(
            f"{type(draft).__name__} cannot be served: it lacks {', '.join(lacks)}. {CHAIN_FORM}; train it "
            "without the engine, or serve the target alone (draft=None)"
        )


def described(value: Any) -> str:
    """Say in a message what was found."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"

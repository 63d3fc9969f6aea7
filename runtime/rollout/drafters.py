"""The engine's copies of drafts: how each protocol turns features of the target into proposals.

Rows of drafted tokens are overwritten when the target's features of those positions are known.
Legend: B sequences, T new rows, k drafted tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError

from .cache import PackedRows
from .drafting import DraftRound, ServedDraft, TargetEnds, Unread, described, served_as


class ServedChain(ServedDraft):
    """Drafts token after token from the draft's own state."""

    def read(self, unread: Unread) -> None:
        """Append trunk rows."""
        self.feed(unread)

    def draft(self, unread: Unread, number: int) -> DraftRound:
        """Append trunk rows; the last of each sequence starts a chain."""
        state, output = self.feed(unread)
        return _ChainRound(self, unread.slots, unread.ends, state, output)

    def feed(self, unread: Unread) -> tuple[Tensor, Tensor]:
        """Append trunk rows; state and output [B, D] of each sequence's last one."""
        device = unread.tokens.device
        rows = PackedRows(unread.slots, unread.starts, unread.counts, device)
        features = torch.cat(list(unread.features))
        fused = self._rows("fuse", self._draft.fuse(features), len(unread.tokens))
        state, output = self._step(fused, unread.tokens, rows)
        return state[rows.last_rows], output[rows.last_rows]

    def advance(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        tokens: Tensor,
        state: Tensor,
        *,
        ahead: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Take chain step ``ahead`` of each sequence: tokens int64 [B], state [B, D] -> state, output."""
        rows = PackedRows(slots, positions, [1] * len(slots), tokens.device)
        return self._step(state, tokens, rows, ahead)

    def _step(
        self, state: Tensor, tokens: Tensor, rows: PackedRows, ahead: int = 0
    ) -> tuple[Tensor, Tensor]:
        embedded = self._ends.embed(tokens)
        result = self._draft.step(state, embedded, self._positions(rows), self._attend(rows, ahead))
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ConfigError(
                f"{type(self.model).__name__}.step must return (state, output), found {described(result)}"
            )
        state, output = (self._rows("step", part, len(tokens)) for part in result)
        return state, output


class _ChainRound:
    def __init__(
        self,
        served: ServedChain,
        slots: Sequence[int],
        ends: list[int],
        state: Tensor,
        output: Tensor,
    ) -> None:
        self._served, self._slots, self._ends = served, slots, ends
        self._state, self._output, self._drafted = state, output, 0

    def confidence(self, previous: Tensor) -> None:
        return None

    def logits(self, previous: Tensor) -> Tensor:
        if self._drafted:
            positions = [end - 1 + self._drafted for end in self._ends]
            self._state, self._output = self._served.advance(
                self._slots, positions, previous, self._state, ahead=self._drafted
            )
        self._drafted += 1
        return self._served.logits(self._output)


class ServedParallel(ServedDraft):
    """Drafts all tokens in one causal pass: trunk rows, then masked ones."""

    def read(self, unread: Unread) -> None:
        """Append trunk rows."""
        self.run(unread, 1)

    def draft(self, unread: Unread, number: int) -> DraftRound:
        """Append trunk rows, and masked ones behind them."""
        return _SlotRound(self, self.run(unread, number))

    def run(self, unread: Unread, number: int) -> Tensor:
        """Outputs [B, number, D] of each sequence's last trunk row and of the masked ones behind it."""
        device, hidden, tokens = unread.tokens.device, [], []
        unknown = self._draft.mask_hidden[0].expand(number - 1, -1)
        masks = unread.tokens.new_full((number - 1,), self._draft.config.mask_token_id)
        for part, ids in zip(unread.features, unread.tokens.split(unread.counts), strict=True):
            hidden += [part.to(unknown.dtype), unknown]
            tokens += [ids, masks]
        counts = [count + number - 1 for count in unread.counts]
        rows = PackedRows(unread.slots, unread.starts, counts, device)
        fused = self._rows("fuse", self._draft.fuse(torch.cat(hidden)), sum(counts))
        embedded = self._ends.embed(torch.cat(tokens))
        output = self._draft.run(fused, embedded, self._positions(rows), self._attend(rows))
        output = self._rows("run", output, sum(counts))
        ahead = torch.arange(1 - number, 1, device=device)
        chosen: Tensor = output[rows.last_rows[:, None] + ahead]
        return chosen


class ServedBlock(ServedDraft):
    """Drafts all tokens in one pass over slots that see each other: those of training, however few are asked."""

    longest: ClassVar[bool] = True

    def read(self, unread: Unread) -> None:
        """Append the trunk's keys and values."""
        rows = PackedRows(
            unread.slots, unread.starts, unread.counts, unread.tokens.device, causal=False
        )
        self.cache.reserve(*rows.room)
        pairs = self._draft.trunk(torch.cat(list(unread.features)), self._positions(rows))
        for layer, (k, v) in enumerate(pairs):
            self.cache.write(layer, rows, k, v)

    def draft(self, unread: Unread, number: int) -> DraftRound:
        """Append the trunk, and fill a block at the newest token of each sequence."""
        self.read(unread)
        output = self.fill(unread.slots, unread.ends, unread.last_tokens())
        return _SlotRound(self, output[:, self._draft.first_slot :])

    def fill(self, slots: Sequence[int], starts: Sequence[int], tokens: Tensor) -> Tensor:
        """Outputs [B, block, D] of blocks at the tokens, int64 [B], of positions ``starts``."""
        size = self._draft.block_size
        ids = tokens.new_full((len(slots), size), self._draft.config.mask_token_id)
        ids[:, 0] = tokens
        rows = PackedRows(slots, starts, [size] * len(slots), tokens.device, causal=False)
        embedded = self._ends.embed(ids.flatten())
        output = self._draft.fill(embedded, self._positions(rows), self._attend(rows))
        filled: Tensor = self._rows("fill", output, ids.numel()).unflatten(0, (-1, size))
        return filled


class _SlotRound:
    """Slots that are all computed; a draft's ``markov_head`` adds what the previous token says."""

    def __init__(self, served: ServedDraft, output: Tensor) -> None:
        self._served, self._output, self._slot = served, output, 0
        self._draft: Any = served.model
        self._head: Any = getattr(self._draft, "markov_head", None)
        self._state: Tensor | None = None

    def confidence(self, previous: Tensor) -> Tensor | None:
        if not hasattr(self._draft, "confidence_head"):
            return None
        vector = self._head.markov_w1(previous)
        chance: Tensor = self._draft.confidence(self._output[:, self._slot], vector).sigmoid()
        return chance

    def logits(self, previous: Tensor) -> Tensor:
        output = self._output[:, self._slot]
        self._slot += 1
        logits = self._served.logits(output)
        if self._head is None:
            return logits
        latent, self._state = self._head.step(output, self._head.markov_w1(previous), self._state)
        bias: Tensor = self._head.markov_w2(latent)
        if bias.shape != logits.shape:  # over the draft's own vocabulary
            bias = self._draft.over_target(bias, 0.0)
        return logits + bias.to(logits.dtype)


KINDS: dict[str, type[ServedDraft]] = {
    "chain": ServedChain,
    "parallel": ServedParallel,
    "block": ServedBlock,
}


def serve(draft: nn.Module, ends: TargetEnds, *, last_position: int) -> ServedDraft:
    """Copy a draft for the engine, by the protocol that it obeys.

    Raises:
        ConfigError: it cannot be served; says what it lacks.
    """
    kind = KINDS.get(served_as(draft), ServedDraft)
    return kind(draft, ends, last_position=last_position)

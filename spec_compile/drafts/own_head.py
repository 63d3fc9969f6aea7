"""Drafts with an output head of their own, over all of the target's tokens or some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import Draft
from .draft_vocabulary import tokens_of


class OwnHead(Draft):
    """A draft whose ``lm_head`` is its own; a reduced vocabulary has the buffers ``d2t`` and ``t2d``."""

    def build_head(self, config: Any) -> None:
        """Make the head, and room for the maps where they are needed."""
        size = config.draft_vocab_size
        self.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        if size != config.vocab_size:
            self.register_buffer("d2t", torch.empty(size, dtype=torch.int64))
            self.register_buffer("t2d", torch.empty(config.vocab_size, dtype=torch.bool))

    def columns(self) -> Tensor | None:
        """int64 [V_d]: the target's ids of the head's tokens; None where they are all of them, in order."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else tokens_of(offsets)

    def target_logits(self, output: Tensor) -> Tensor:
        """Logits [R, V] over the target's tokens; -inf for those that the draft does not know."""
        return self.over_target(self.lm_head(output), float("-inf"))

    def over_target(self, values: Tensor, other: float) -> Tensor:
        """Spread values of the draft's tokens, [R, V_d], over the target's, [R, V]; others get ``other``."""
        columns = self.columns()
        if columns is None:
            return values
        whole = values.new_full((*values.shape[:-1], self.config.vocab_size), other)
        return whole.index_copy(-1, columns, values)

"""MTP of speculators in the draft contract: its own layer runs, and each step sees keys of that step alone.

So it is not the mathematics of `spec_compile.drafts.MTP`, whose later steps see the first step's keys and their
own, as in serving. Legend: T rows, D hidden size, K steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.errors import ConfigError
from spec_compile.ir.ops import label_losses, shift

LAYERS = ("qwen3",)
"""Kinds of layers whose attention and rotary positions were tried."""


class SpeculatorsMTP(nn.Module):
    """An ``MTPDraftModel``; embeddings and head, which are frozen there, are the target's own."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: Any, loss_decay: float = 0.6) -> None:
        """Wrap a module whose parameters are trained in place.

        Args:
            model: its attention implementation is set to ``sdpa``.
            loss_decay: weight of step k's loss is ``loss_decay ** k``, over the sum of all; 1.0 weighs alike.

        Raises:
            ConfigError: its layer is of a kind that is not supported.
        """
        super().__init__()
        kind = model.config.transformer_layer_config.model_type
        if kind not in LAYERS:
            raise ConfigError(
                f"MTPDraftModel has a layer of type {kind!r}, expected {', '.join(LAYERS)}: others rotate or gate in "
                "ways that were not tried; train drafts.MTP instead"
            )
        self.layer: Any = model.mtp_layers[0]
        self.layer.self_attn.config._attn_implementation = "sdpa"
        self.rotary_emb: Any = model.rotary_emb
        self.num_steps = int(model.config.num_speculative_steps)
        weights = [loss_decay**step for step in range(self.num_steps)]
        self.weights = [weight / sum(weights) for weight in weights]

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Unroll K steps; sums are vectors [K], one entry a step."""
        document, teacher = inputs.document, inputs.teacher
        seen = (inputs.index[:, None] >= inputs.index) & (document[:, None] == document)
        hidden = teacher.hidden.to(self.layer.input_proj.weight.dtype)[None]
        places = inputs.positions[None]
        wave = self.rotary_emb(hidden, places)
        losses, counts, accepted = [], [], []
        for step, weight in enumerate(self.weights):
            embedded = inputs.embedding(shift(inputs.tokens, step + 1, document))
            hidden = self.layer(
                hidden_states=hidden,
                token_embeddings=embedded.to(hidden.dtype)[None],
                attention_mask=seen[None, None],
                position_ids=places,
                position_embeddings=wave,
            )
            valid = self.valid(inputs, step)
            labels = torch.where(valid, shift(inputs.tokens, step + 2, document), -1)
            law, head = shift(teacher.hidden, step + 1, document), teacher.weight
            loss, distance = label_losses(hidden[0], head.to(hidden.dtype), law, head, labels)
            losses.append(weight * loss.sum())
            counts.append(valid.sum())
            accepted.append(torch.where(valid, 1 - distance.detach() / 2, 0.0).sum())
        stats = {"acceptance": torch.stack(accepted)}
        return DraftOutput(torch.stack(losses), torch.stack(counts), stats)

    def valid(self, inputs: DraftInputs, step: int) -> Tensor:
        """Tell which rows count, bool [T]: those from which all K steps have a token to predict, as theirs."""
        every = torch.ones_like(inputs.loss_mask)
        room = shift(every, self.num_steps + 1, inputs.document)
        return room & shift(inputs.loss_mask, step + 2, inputs.document)

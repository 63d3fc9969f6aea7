"""P-EAGLE of speculators in the draft contract: its own layers run on the joined rows of all depths.

Their training draws which rows have later depths (COD sampling) and gathers those. Here every row has them, or
the batch's anchors do, which are a function of seed and document. Legend: T rows, A anchors, K depths, R elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.drafts.blocks import Blocks, slot_stats
from spec_compile.drafts.draft_vocabulary import tokens_of
from spec_compile.drafts.objective import distance
from spec_compile.errors import ConfigError
from spec_compile.ir.ops import shift


@dataclass(frozen=True)
class PEagleRules:
    """Which loss every element has, by the names of `PEagleConfig`; elements count alike."""

    loss: str = "kl"
    lk_scale: float = 1.0
    lk_decay: float = 3.0
    skip_unknown: bool = False


@dataclass(frozen=True)
class Elements:
    """Rows at depth 0, and behind them those of each later depth, which lie at rows or at anchors."""

    first: Tensor
    """int64 [R]: the row that an element's chain begins at; 0 for unused anchors."""
    used: Tensor
    """bool [R]."""
    depth: Tensor
    """int64 [R]."""
    positions: Tensor
    """int64 [R]."""
    later: int
    """Elements of one later depth."""

    @classmethod
    def of(cls, inputs: DraftInputs, depths: int) -> Elements:
        """Lay out all depths."""
        first, positions = inputs.index, inputs.positions
        if inputs.anchors is not None:
            first, positions = inputs.anchors, Blocks.of(inputs, 1).positions[:, 0]
        numbers = [torch.zeros_like(inputs.index)]
        numbers += [torch.full_like(first, k) for k in range(1, depths)]
        return cls(
            torch.cat([inputs.index, *[first.clamp_min(0)] * (depths - 1)]),
            torch.cat([inputs.index >= 0, *[first >= 0] * (depths - 1)]),
            torch.cat(numbers),
            torch.cat([inputs.positions, *[positions + k for k in range(1, depths)]]),
            first.shape[0],
        )


def windows_of(model: Any) -> list[int | None]:
    """Sliding window of each layer of a module of speculators; at P-EAGLE's depth k it is shorter by k."""
    sliding = model.sliding_window_indices
    return [model.sliding_window if i in sliding else None for i in range(len(model.layers))]


class SpeculatorsPEagle(nn.Module):
    """A ``PEagleDraftModel`` that predicts ``num_depths`` tokens in one pass."""

    def __init__(
        self,
        model: Any,
        num_depths: int = 8,
        anchors_per_document: int | None = None,
        rules: PEagleRules | None = None,
    ) -> None:
        """Wrap a module whose parameters are trained in place.

        Args:
            model: attends by ``scaled_dot_product_attention``.
            num_depths: tokens K that one pass predicts.
            anchors_per_document: as `PEagleConfig.anchors_per_document`.
            rules: of the loss.

        Raises:
            ConfigError: the module has no mask token, or a number is below 1.
        """
        super().__init__()
        if model.mask_token_id is None:
            raise ConfigError("PEagleDraftModel has no mask_token_id: give its configuration one")
        if num_depths < 1 or (anchors_per_document is not None and anchors_per_document < 1):
            raise ConfigError(
                "num_depths and anchors_per_document must be at least 1, found "
                f"{num_depths} and {anchors_per_document}"
            )
        self.model = model
        self.taps = tuple(int(layer) for layer in model.target_layer_ids)
        self.num_depths, self.rules = num_depths, rules or PEagleRules()
        if anchors_per_document is not None:
            self.block_size, self.anchors_per_document = num_depths, anchors_per_document

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Run all depths in one pass; one sum over all elements, divided by their number."""
        if not hasattr(self, "anchors_per_document"):
            inputs = DraftInputs(**{**vars(inputs), "anchors": None})
        elements = Elements.of(inputs, self.num_depths)
        states = self.decode(inputs, elements)[0]
        head = self.model.lm_head.weight
        columns = tokens_of(self.model.d2t) if self.model.use_draft_vocab else None
        total, later = inputs.tokens.shape[0], elements.later
        losses, counts, overlaps = [], [], []
        for depth in range(self.num_depths):
            end = total + depth * later
            state = states[end - later : end] if depth else states[:total]
            teacher, valid = self.target(inputs, depth)
            loss, overlap = distance(
                self.rules, state, head, teacher, inputs.teacher, valid, columns
            )
            losses.append(loss)
            counts.append(valid.sum())
            overlaps.append(overlap)
        stats = {"acceptance": torch.stack(overlaps).sum(), **slot_stats(overlaps, counts)}
        return DraftOutput(torch.stack(losses).sum(), torch.stack(counts).sum(), stats)

    def decode(self, inputs: DraftInputs, elements: Elements) -> Tensor:
        """Run their layers on all elements; normed hidden states [1, R, D]."""
        model, later = self.model, elements.later * (self.num_depths - 1)
        tokens = shift(inputs.tokens, 1, inputs.document)
        blank = tokens.new_full((later,), model.mask_token_id)
        embedded = model.embed_tokens(torch.cat([tokens, blank]))
        features = inputs.features.to(model.fc.weight.dtype)
        unknown = model.mask_hidden[0].expand(later, -1)
        fused = self.fuse(torch.cat([features, unknown]))

        hidden = torch.cat([embedded.to(fused.dtype), fused], -1)[None]
        places = elements.positions[None]
        wave = model.rotary_emb(hidden, places)
        windows = windows_of(model)
        masks = {window: self.mask(inputs, elements, window) for window in windows}
        for layer, window in zip(model.layers, windows, strict=True):
            hidden = layer(
                hidden,
                attention_mask=masks[window],
                position_ids=places,
                position_embeddings=wave,
            )
        normed: Tensor = model.norm(hidden)
        return normed

    def fuse(self, features: Tensor) -> Tensor:
        """Map features, [R, m D_t], to hidden states [R, D], by their norms and ``fc``."""
        model = self.model
        if model.input_norm is not None:
            features = model.input_norm(features)
        if model.fc_norm is not None:
            chunks = features.chunk(len(model.fc_norm), -1)
            normed = [norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)]
            features = torch.cat(normed, -1)
        fused: Tensor = model.fc(features)
        return fused

    def mask(self, inputs: DraftInputs, elements: Elements, window: int | None) -> Tensor:
        """Their mask of all elements; those of unused anchors see nothing, and are not seen."""
        from speculators.models.peagle.attention import create_peagle_mask_mod

        rule = create_peagle_mask_mod(elements.first, elements.depth, inputs.document, window)
        used, rows = elements.used, elements.first.shape[0]

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            shown: Tensor = rule(batch, head, q, k)
            return shown & used[q] & used[k]

        return create_mask(visible, None, None, rows, rows, inputs.tokens.device)

    def target(self, inputs: DraftInputs, depth: int) -> tuple[Tensor, Tensor]:
        """What the teacher's head reads for each element of a depth, and whether it counts.

        Theirs is the mask of the token that is read, and a later depth exists where all of its chain's count.
        """
        ahead = range(2, depth + 2) if depth else range(1, 2)
        if depth == 0 or inputs.anchors is None:
            teacher = shift(inputs.teacher.hidden, depth + 1, inputs.document)
            counted = [shift(inputs.loss_mask, j, inputs.document) for j in ahead]
            return teacher, torch.stack(counted).all(0)
        blocks = Blocks.of(inputs, depth + 2)
        device = inputs.tokens.device
        _, valid = blocks.targets(inputs, torch.arange(2, depth + 2, device=device))
        return inputs.teacher.hidden[blocks.rows[:, depth + 1]], valid.all(1)

"""DSpark: DFlash's block with a low-rank head for the previous token, and one for its own confidence.

Source: DSpark (DeepSeek 2026) and the public DeepSpec code. Legend: A anchors, B slots, D hidden
size, V vocabulary, r rank.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.ops import label_losses

from .blocks import Blocks, by_slot
from .config import DraftConfig
from .dflash import DFlash
from .dflash_config import DSparkConfig


class MarkovHead(nn.Module):
    """What the previous token adds to the logits: ``w2(w1[token])``."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def step(
        self, hidden: Tensor, vector: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Give what ``markov_w2`` reads at one slot, [R, r], and the state for the next one.

        Args:
            hidden: [R, D], of the slot.
            vector: [R, r], ``markov_w1`` of the previous token.
            state: of the slot before; None at the first.
        """
        return vector, None


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot's token is accepted."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        extra = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)


class DSpark(DFlash):
    """The DSpark draft: slot ``j`` of a block, the anchor's own included, predicts the token behind it.

    Without ``sample_from_anchor`` slots predict their own places, as DFlash's do.

    Its law is held to the target's by total variation and to the token by cross-entropy; the
    confidence head learns the probability with which a verifier accepts.
    """

    config_class: ClassVar[type[DraftConfig]] = DSparkConfig

    def build(self, config: DSparkConfig) -> None:  # type: ignore[override]
        """Make the parts."""
        super().build(config)
        self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Fill all blocks; the sum of weighted losses, and what it is divided by."""
        config: DSparkConfig = self.config
        blocks, number = Blocks.of(inputs, self.block_size), self.num_draft_tokens
        hidden = self.decode(inputs, blocks)[:, self.first_slot :].flatten(0, 1)
        place = torch.arange(number, device=inputs.tokens.device)
        labels, valid = blocks.targets(inputs, place + 1)
        valid = valid.long().cumprod(1)  # a slot counts where all before it do
        labels = torch.where(valid > 0, labels, -1).flatten()
        weight = (self.decay(place, hidden) * valid).flatten()

        rows, head = blocks.rows[:, :number].flatten(), inputs.teacher.weight
        previous = self.markov_head.markov_w1(inputs.tokens[rows])
        ce, l1 = label_losses(
            hidden, head.to(hidden.dtype), inputs.teacher.hidden[rows], head, labels,
            previous, self.markov_head.markov_w2.weight,
        )  # fmt: skip
        accepted = (1 - l1.detach() / 2).clamp(0, 1)

        loss = config.ce_weight * ce + config.l1_weight * l1
        stats = {"ce": ce, "l1": l1, "acceptance": accepted}
        if config.enable_confidence_head:
            confidence = self.confidence(hidden, previous).to(l1.dtype)
            bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
            loss = loss + config.confidence_weight * bce
            stats["confidence"] = bce
        sums = {name: (weight * value.detach()).sum() for name, value in stats.items()}
        sums |= by_slot(accepted, valid > 0)
        return DraftOutput((weight * loss).sum(), self.divisor(weight), sums)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [R] of acceptance from hidden states [R, D] and the previous tokens' vectors [R, r]."""
        if self.config.confidence_head_with_markov:
            hidden = torch.cat((hidden, previous), -1)
        logits: Tensor = self.confidence_head.proj(hidden)[:, 0]
        return logits

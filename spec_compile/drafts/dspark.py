"""DSpark: DFlash's block with a low-rank head for the previous token, and one for its own confidence.

Source: DSpark (DeepSeek 2026) and the public DeepSpec code. Legend: A anchors, B slots, D hidden
size, V vocabulary, r rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

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
    """What the tokens before a slot add to its logits: ``w2`` of a vector of rank r.

    "vanilla": ``w1[token]`` of the previous token; "gated": that, times a gate that also sees the slot's hidden
    state; "rnn": the output of a recurrent cell, whose state goes on from slot to slot.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank, dim = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(dim + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + dim, 3 * rank)

    def step(
        self, hidden: Tensor, vector: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Give what ``markov_w2`` reads at one slot, [R, r], and the state for the next one.

        Args:
            hidden: [R, D], of the slot.
            vector: [R, r], ``markov_w1`` of the previous token.
            state: [R, r], of the slot before; None at the first.
        """
        if self.kind == "vanilla":
            return vector, None
        if self.kind == "gated":
            return self.gate_proj(torch.cat((hidden, vector), -1)).sigmoid() * vector, None
        state = torch.zeros_like(vector) if state is None else state
        joint = self.joint_proj(torch.cat((state, vector, hidden), -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def over_blocks(self, hidden: Tensor, vectors: Tensor, slots: int) -> Tensor:
        """Run `step` over all slots of blocks: [A * slots, D] and [A * slots, r] to [A * slots, r]."""
        if self.kind != "rnn":
            return self.step(hidden, vectors, None)[0]
        columns = (hidden.unflatten(0, (-1, slots)), vectors.unflatten(0, (-1, slots)))
        state, outputs = None, []
        for slot in range(slots):
            output, state = self.step(columns[0][:, slot], columns[1][:, slot], state)
            outputs.append(output)
        return torch.stack(outputs, 1).flatten(0, 1)


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
        laws = (
            hidden, self.head(inputs, hidden.dtype), inputs.teacher.hidden[rows], head, labels,
            self.markov_head.over_blocks(hidden, previous, number), self.markov_head.markov_w2.weight,
            self.columns(),
        )  # fmt: skip
        part = config.teacher_law == "draft" and self.columns() is not None
        ce, l1 = label_losses(*laws, renormalised=part)
        wanted = accepted = (1 - l1.detach() / 2).clamp(0, 1)
        if part:  # what an engine accepts is the same, whatever the loss is held to
            accepted = (1 - label_losses(*laws)[1].detach() / 2).clamp(0, 1)

        loss = config.ce_weight * ce + config.l1_weight * l1
        stats = {"ce": ce, "l1": l1, "acceptance": accepted}
        if config.enable_confidence_head:
            confidence = self.confidence(hidden, previous).to(l1.dtype)
            bce = F.binary_cross_entropy_with_logits(confidence, wanted, reduction="none")
            loss = loss + config.confidence_weight * bce
            stats["confidence"] = bce
        sums = {name: (weight * value.detach()).sum() for name, value in stats.items()}
        sums |= {"acceptance_count": weight.sum(), **by_slot(accepted, valid > 0)}
        return DraftOutput((weight * loss).sum(), self.divisor(weight), sums)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [R] of acceptance from hidden states [R, D] and the previous tokens' vectors [R, r]."""
        if self.config.confidence_head_with_markov:
            hidden = torch.cat((hidden, previous), -1)
        logits: Tensor = self.confidence_head.proj(hidden)[:, 0]
        return logits

"""DFlash: a block of mask tokens behind an anchor, filled in by one non-causal pass.

Source: the public DFlash code and checkpoints (Z Lab). Legend: T rows of the packed row, A anchors,
B slots of a block, D hidden size, H heads.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.ops import branch_attention, label_losses

from .base import Draft
from .blocks import Blocks
from .config import DraftConfig
from .decoder import DecoderLayer
from .dflash_config import DFlashConfig
from .layers import RMSNorm
from .losses import teacher_losses


class DFlash(Draft):
    """The DFlash draft: slot 0 holds the anchor's token, slot ``j`` predicts the j-th token behind it.

    All slots of a block see each other, and the trunk (the target's features, as keys of every
    layer) strictly in front of the anchor: that row's feature does not exist yet when an engine
    drafts. Head and embeddings are the target's.
    """

    config_class: ClassVar[type[DraftConfig]] = DFlashConfig

    def build(self, config: DFlashConfig) -> None:
        """Make the parts."""
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, dim, bias=False)
        self.hidden_norm = RMSNorm(dim, eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(dim, eps)
        self.taps = config.taps
        self.block_size = config.block_size
        self.anchors_per_document = config.anchors_per_document

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        block_size: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Self:
        """Make a new draft for a target: its sizes and its RoPE.

        Args:
            target: a transformers causal LM of 2 or more layers; a meta one gives a meta draft.
            block_size: slots B of a block; None means the family's usual number.
            seed: of the weights.
            dtype: None means that of the target's head.
            overrides: any field of the configuration.
        """
        if block_size is not None:
            overrides["block_size"] = block_size
        return cls._from_target(target, seed, dtype, **overrides)

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Fill all blocks; the sum of weighted losses, and what it is divided by."""
        blocks = Blocks.of(inputs, self.block_size)
        hidden = self.decode(inputs, blocks)[:, 1:]
        ahead = torch.arange(1, self.block_size, device=inputs.tokens.device)
        labels, valid = blocks.targets(inputs, ahead)
        labels = torch.where(valid, labels, -1).flatten()
        loss, overlap = self.losses(inputs, hidden.flatten(0, 1), blocks.rows[:, :-1], labels)
        weight = (self.decay(ahead - 1, loss) * valid).flatten()
        stats = {"acceptance": (weight * overlap).sum()}
        return DraftOutput((weight * loss).sum(), self.divisor(weight), stats)

    def losses(
        self, inputs: DraftInputs, hidden: Tensor, rows: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of every slot, [R], and its law's overlap with the teacher's.

        Args:
            inputs: of the draft.
            hidden: [R, D], normed.
            rows: int64, R in all: the row in front of the predicted token.
            labels: int64 [R], the predicted token; negative for a slot that does not count.
        """
        head, teacher = inputs.teacher.weight, inputs.teacher.hidden[rows.flatten()]
        own = head.to(hidden.dtype)
        if self.config.loss_type == "kl":
            loss, overlap = teacher_losses(hidden, own, teacher, head, "kl")
            return torch.where(labels >= 0, loss, 0.0), overlap
        loss, distance = label_losses(hidden, own, teacher, head, labels)
        return loss, 1 - distance.detach() / 2

    def divisor(self, weight: Tensor) -> Tensor:
        """Sum the slots' weights [R], or count the slots that have one."""
        return (weight > 0).sum() if self.config.loss_mean_over == "valid" else weight.sum()

    def decay(self, place: Tensor, like: Tensor) -> Tensor:
        """Weight of the predicted tokens by their place in the block, from 0 on."""
        return torch.exp(-place.to(accumulator(like.dtype)) / self.config.loss_decay_gamma)

    def decode(self, inputs: DraftInputs, blocks: Blocks) -> Tensor:
        """Run the layers on all blocks; normed hidden states [A, B, D]."""
        dtype = self.fc.weight.dtype
        trunk = self.hidden_norm(self.fc(inputs.features.to(dtype)))
        first = inputs.embedding(inputs.tokens[blocks.rows[:, 0]])[:, None]
        mask = inputs.embedding(inputs.tokens.new_full((1,), self.config.mask_token_id))
        masks = mask.expand(blocks.anchors.shape[0], self.block_size - 1, -1)
        hidden = torch.cat((first, masks), 1).flatten(0, 1).to(dtype)
        positions, number = blocks.positions.flatten(), blocks.number
        limit, document = blocks.per_slot(blocks.anchors), blocks.per_slot(blocks.document)
        for layer in list[Any](self.layers):
            q, k, v = layer.project(hidden, positions)
            k_main, v_main = layer.self_attn.keys(trunk, inputs.positions)
            mixed = branch_attention(
                q, k_main, v_main, [(k, v, number, number)],
                q_limit=limit, q_document=document, k_document=inputs.document,
            )  # fmt: skip
            hidden = layer.finish(mixed, hidden)
        normed: Tensor = self.norm(hidden).unflatten(0, (-1, self.block_size))
        return normed

"""DFlash: a block of mask tokens behind an anchor, filled in by one non-causal pass.

Source: the public DFlash code and checkpoints (Z Lab). Legend: T rows of the packed row, A anchors,
B slots of a block, D hidden size, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.ops import branch_attention, label_losses, law_losses

from .blocks import Blocks, by_slot
from .config import DraftConfig, windows
from .decoder import DecoderLayer
from .dflash_config import DFlashConfig
from .layers import RMSNorm
from .own_head import OwnHead

Attend = Callable[..., Tensor]


class DFlash(OwnHead):
    """The DFlash draft: slot 0 holds the anchor's token, slot ``j`` predicts the j-th token behind it.

    With ``sample_from_anchor`` slot 0 predicts too, and slot ``j`` the token after that.

    All slots of a block see each other, and the trunk (the target's features, as keys of every
    layer) strictly in front of the anchor: that row's feature does not exist yet when an engine
    drafts. Embeddings are the target's, and so is the head, unless the vocabulary is reduced.
    """

    config_class: ClassVar[type[DraftConfig]] = DFlashConfig
    served_as = "block"

    def build(self, config: DFlashConfig) -> None:
        """Make the parts."""
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, dim, bias=False)
        self.hidden_norm = RMSNorm(dim, eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(dim, eps)
        if config.draft_vocab_size != config.vocab_size:
            self.build_head(config)
        self.taps = config.taps
        self.block_size = config.block_size
        self.anchors_per_document = config.anchors_per_document
        self.first_slot = 0 if config.sample_from_anchor else 1

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that one block predicts."""
        slots: int = self.block_size
        return slots - self.first_slot

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
        blocks, number = Blocks.of(inputs, self.block_size), self.num_draft_tokens
        hidden = self.decode(inputs, blocks)[:, self.first_slot :].flatten(0, 1)
        place = torch.arange(number, device=inputs.tokens.device)
        labels, valid = blocks.targets(inputs, place + 1)
        labels = torch.where(valid, labels, -1).flatten()
        loss, overlap = self.losses(inputs, hidden, blocks.rows[:, :number], labels)
        weight = (self.decay(place, loss) * valid).flatten()
        stats = {"acceptance": (weight * overlap).sum(), "acceptance_count": weight.sum()}
        stats |= by_slot(overlap, valid)
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
        own, columns, live = self.head(inputs, hidden.dtype), self.columns(), labels >= 0
        if self.config.loss_type == "kl":
            ce, overlap, entropy, known = law_losses(hidden, own, teacher, head, columns, live)
            if self.config.skip_unknown and columns is not None:
                live = live & (known > 0)
            return torch.where(live, ce - entropy, 0.0), overlap.detach()
        loss, distance = label_losses(hidden, own, teacher, head, labels, columns=columns)
        return loss, 1 - distance.detach() / 2

    def head(self, inputs: DraftInputs, dtype: torch.dtype) -> Tensor:
        """[V_d, D]: what maps normed hidden states to logits."""
        own = getattr(self, "lm_head", None)
        weight: Tensor = inputs.teacher.weight if own is None else own.weight
        return weight.to(dtype)

    @property
    def logits(self) -> Callable[[Tensor], Tensor] | None:
        """Map what `fill` gave, [R, D], to logits [R, V]; None where the target's head does."""
        return None if getattr(self, "lm_head", None) is None else self.target_logits

    def divisor(self, weight: Tensor) -> Tensor:
        """Sum the slots' weights [R], or count the slots that have one."""
        return (weight > 0).sum() if self.config.loss_mean_over == "valid" else weight.sum()

    def decay(self, place: Tensor, like: Tensor) -> Tensor:
        """Weight of the predicted tokens by their place in the block, from 0 on."""
        return torch.exp(-place.to(accumulator(like.dtype)) / self.config.loss_decay_gamma)

    def decode(self, inputs: DraftInputs, blocks: Blocks) -> Tensor:
        """Run the layers on all blocks; normed hidden states [A, B, D]."""
        number, document = blocks.number, blocks.per_slot(blocks.document)
        limit = blocks.per_slot(blocks.anchors)
        main = iter(self.trunk(inputs.features, inputs.positions))

        def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
            """Attend to the trunk in front of the anchor, and to the whole block."""
            return branch_attention(
                q, *next(main), [(k, v, number, number)],
                q_limit=limit, q_document=document, k_document=inputs.document, window=window,
            )  # fmt: skip

        normed = self.fill(self.embedded(inputs, blocks), blocks.positions.flatten(), attend)
        hidden: Tensor = normed.unflatten(0, (-1, self.block_size))
        return hidden

    def embedded(self, inputs: DraftInputs, blocks: Blocks) -> Tensor:
        """Embed the anchors' tokens and the masks behind them, [A * B, D_t]."""
        first = inputs.embedding(inputs.tokens[blocks.rows[:, 0]])[:, None]
        mask = inputs.embedding(inputs.tokens.new_full((1,), self.config.mask_token_id))
        masks = mask.expand(blocks.anchors.shape[0], self.block_size - 1, -1)
        return torch.cat((first, masks), 1).flatten(0, 1)

    def trunk(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, [T, Hkv, head_dim], that each layer has of the target's features [T, m D_t]."""
        rows = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return [layer.self_attn.keys(rows, positions) for layer in list[Any](self.layers)]

    def fill(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers on the slots of blocks: the same in training and in serving.

        Args:
            embedded: [R, D_t], the target's embeddings of the slots' tokens.
            positions: int64 [R].
            attend: (q, k, v, window=), [R, H, head_dim] each, to [R, Hq, head_dim], called once a layer;
                knows the layer's trunk and what each slot sees.

        Returns:
            Normed hidden states [R, D].
        """
        hidden = embedded.to(self.fc.weight.dtype)
        for layer, window in zip(list[Any](self.layers), windows(self.config), strict=True):
            mixed = attend(*layer.project(hidden, positions), window=window)
            hidden = layer.finish(mixed, hidden)
        normed: Tensor = self.norm(hidden)
        return normed

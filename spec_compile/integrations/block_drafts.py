"""DFlash drafts of other projects in the draft contract: their layers, our anchors, labels and loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs
from spec_compile.drafts import DFlash
from spec_compile.drafts.blocks import Blocks
from spec_compile.drafts.config import rope_of
from spec_compile.drafts.dflash_config import DFlashConfig


class ForeignDFlash(DFlash):
    """A DFlash whose `decode` is another project's module; that one's parameters are its only ones."""

    def __init__(self, model: nn.Module, config: DFlashConfig) -> None:
        """Wrap a module; its parameters are trained in place."""
        nn.Module.__init__(self)
        self.model: Any = model
        self.config = config
        self.taps = config.taps
        self.block_size = config.block_size
        self.anchors_per_document = config.anchors_per_document
        self.first_slot = 0 if config.sample_from_anchor else 1

    def decode(self, inputs: DraftInputs, blocks: Blocks) -> Tensor:
        """Run the layers on all blocks; normed hidden states [A, B, D]."""
        embedded = self.embedded(inputs, blocks).to(self.model.fc.weight.dtype)
        positions = torch.cat((inputs.positions, blocks.positions.flatten()))
        normed = self.layers_on(inputs, blocks, embedded[None], positions[None])
        hidden: Tensor = normed[0].unflatten(0, (-1, self.block_size))
        return hidden

    def layers_on(
        self, inputs: DraftInputs, blocks: Blocks, embedded: Tensor, positions: Tensor
    ) -> Tensor:
        """Call the module.

        Args:
            inputs: of the draft.
            blocks: at the anchors.
            embedded: [1, A * B, D], the slots' tokens.
            positions: int64 [1, T + A * B], of the trunk and of the slots.

        Returns:
            Normed hidden states [1, A * B, D].
        """
        raise NotImplementedError


def block_config(
    layer: Any, *, kind: type[DFlashConfig] = DFlashConfig, **fields: Any
) -> DFlashConfig:
    """Describe a block draft by the transformers configuration of its layers, and its own fields."""
    theta, scaling = rope_of(layer)
    sizes = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "num_hidden_layers", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
    )  # fmt: skip
    read = {name: getattr(layer, name) for name in sizes}
    known = {"target_hidden_size": layer.hidden_size, "rope_theta": theta, "rope_scaling": scaling}
    return kind(**{**read, **known, **fields})

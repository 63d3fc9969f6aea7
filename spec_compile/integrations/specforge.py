"""Draft modules of SpecForge in the draft contract; their parameters are trained in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs
from spec_compile.drafts import Eagle3, Eagle3Config
from spec_compile.drafts.blocks import Blocks
from spec_compile.drafts.config import rope_of
from spec_compile.drafts.draft_vocabulary import tokens_of
from spec_compile.errors import ConfigError

from .block_drafts import ForeignDFlash, block_config


class SpecForgeDFlash(ForeignDFlash):
    """A ``DFlashDraftModel``: its own forward, under its own mask cut at document ends."""

    def layers_on(
        self, inputs: DraftInputs, blocks: Blocks, embedded: Tensor, positions: Tensor
    ) -> Tensor:
        """Run their module."""
        mask = self.mask(inputs, blocks)
        normed: Tensor = self.model(
            position_ids=positions,
            noise_embedding=embedded,
            target_hidden=inputs.features.to(embedded.dtype)[None],
            attention_mask=mask,
        )
        return normed

    def mask(self, inputs: DraftInputs, blocks: Blocks) -> Tensor:
        """Their mask, which knows one document, and the same document's rows."""
        from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask

        total = inputs.tokens.shape[0]
        within: Tensor = create_dflash_sdpa_mask(
            blocks.anchors[None].clamp_min(0),
            (blocks.anchors >= 0)[None],
            total,
            self.block_size,
            inputs.tokens.device,
        )
        same = blocks.per_slot(blocks.document)[:, None] == inputs.document
        own = torch.ones_like(within[0, 0, :, total:])
        return within & torch.cat((same, own), 1)


def from_specforge(model: Any, **options: Any) -> nn.Module:
    """Wrap a draft module of SpecForge; its parameters are trained in place.

    A ``LlamaForCausalLMEagle3`` becomes an `Eagle3` over the same parameters: its own attention bounds the number
    of rows by its rotary table, and knows no documents. Logits, losses and gradients are the same.

    Args:
        model: a ``DFlashDraftModel`` or a ``LlamaForCausalLMEagle3``.
        options: fields of `DFlashConfig` or `Eagle3Config`; ``taps`` of an EAGLE-3 are needed, because the
            module does not know them.

    Raises:
        ConfigError: another module, one with sliding windows, or a reduced vocabulary without a map.
    """
    kind = type(model).__name__
    if kind == "DFlashDraftModel":
        return _dflash(model, options)
    if kind == "LlamaForCausalLMEagle3":
        return _eagle3(model, options)
    raise ConfigError(
        f"from_specforge takes a DFlashDraftModel or a LlamaForCausalLMEagle3, found {kind}; load its checkpoint into "
        "a draft of this package instead"
    )


def _dflash(model: Any, options: dict[str, Any]) -> SpecForgeDFlash:
    if model.sliding_window is not None:
        raise ConfigError(
            "SpecForge's sliding windows begin later for each slot of a block, which branch_attention has no form for: "
            "its window is that of the anchor; use full attention"
        )
    model.config._attn_implementation = "sdpa"
    fields = {
        "taps": tuple(int(layer) + 1 for layer in model.target_layer_ids),
        "mask_token_id": model.mask_token_id,
        "block_size": model.block_size,
    }
    return SpecForgeDFlash(model, block_config(model.config, **{**fields, **options}))


def _eagle3(model: Any, options: dict[str, Any]) -> Eagle3:
    config = model.config
    reduced = model.draft_vocab_size != model.vocab_size
    if reduced and int(model.t2d.sum()) != model.draft_vocab_size:
        raise ConfigError(
            f"LlamaForCausalLMEagle3 has a draft vocabulary of {model.draft_vocab_size} without a map; call its "
            "load_vocab_mapping(file) first"
        )
    theta, scaling = rope_of(config)
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "hidden_act", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    fields = {name: getattr(config, name) for name in names} | {
        "target_hidden_size": model.target_hidden_size,
        "draft_vocab_size": model.draft_vocab_size,
        "fc_norm": model.fc_norm is not None,
        "head_norm": model.norm_output,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "loss_mask_of": "previous",
        "loss_mean_over": "rows",
    }
    known = tokens_of(model.d2t) if reduced else None
    draft = Eagle3(Eagle3Config(**{**fields, **options}), device="meta", draft_vocab=known)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    draft.load_state_dict({name: named[name] for name in draft.state_dict()}, assign=True)
    return draft

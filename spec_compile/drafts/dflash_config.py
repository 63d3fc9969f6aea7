"""Sizes and options of block drafts, and their public forms in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from spec_compile.errors import ConfigError

from .config import (
    FULL,
    SLIDING,
    DraftConfig,
    check_draft_vocab,
    check_layer_types,
    check_taps,
)
from .dialects import outputs_of_taps, taps_of_outputs

MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""vLLM serves the first one only; the engine here all of them."""
QWEN3_MASK = 151669
"""The id that public drafts of Qwen3 use; smaller vocabularies use their last one."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """What a `DFlash` is made of."""

    taps: tuple[int, ...]
    """Features, "after i layers" (0 is the embeddings); public files hold ``i - 1``, "output of layer"."""
    mask_token_id: int
    """Token of the slots that are to be predicted."""
    draft_vocab_size: int | None = None
    """Tokens that the draft can propose, with a head of its own; None means all of the target's, with its head."""
    num_hidden_layers: int = 5
    block_size: int = 16
    anchors_per_document: int = 512
    """Blocks that training draws in each document when the batch brings no anchors."""
    sample_from_anchor: bool = False
    """The anchor's own slot predicts too: slot j predicts the token behind its place, not that of its place."""
    layer_types: tuple[str, ...] | None = None
    """"full_attention" or "sliding_attention" for each layer; None means all full."""
    sliding_window: int | None = None
    """Trunk rows in front of the anchor that a sliding layer sees; the block always sees all of itself."""
    qk_norm: bool = True
    loss_decay_gamma: float = 4.0
    """Weight of the i-th predicted token is ``exp(-i / gamma)``."""
    loss_type: str = "label"
    """Cross-entropy to the token itself, or "kl" from the teacher's law (as speculators has it), renormalised over
    the draft's vocabulary. A slot whose token is not in the draft's vocabulary has no cross-entropy (it counts)."""
    skip_unknown: bool = True
    """So does "kl" where the likeliest token is not in the draft's vocabulary; speculators does not skip it."""
    loss_mean_over: str = "weights"
    """The loss is divided by the sum of "weights", or by the number of "valid" slots (speculators)."""

    family: ClassVar[str] = "DFlash"
    counted: ClassVar[tuple[str, ...]] = ("block_size", "anchors_per_document")
    positive: ClassVar[tuple[str, ...]] = ("loss_decay_gamma",)
    loss_types: ClassVar[tuple[str, ...]] = ("label", "kl")

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", check_taps(self, self.taps))
        self.choose("loss_type", *self.loss_types)
        self.choose("loss_mean_over", "weights", "valid")
        if self.draft_vocab_size is None:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        super().__post_init__()
        check_draft_vocab(self)
        check_layer_types(self)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise self.error(
                f"mask_token_id={self.mask_token_id} is outside 0..{self.vocab_size - 1}"
            )
        smallest = 1 if self.sample_from_anchor else 2
        if self.block_size < smallest:
            raise self.error(f"block_size must be at least {smallest}, found {self.block_size}")

    @classmethod
    def defaults_for(
        cls, target_layers: int, vocab_size: int, overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One feature a layer of the draft, spread over the target; they stay inside a small one."""
        number = int(overrides.get("num_hidden_layers", cls.num_hidden_layers))
        if number == 1:
            outputs = [target_layers // 2]
        else:
            step = (target_layers - 4) / max(number - 1, 1)
            outputs = [round(1 + i * step) for i in range(number)]
        taps = tuple(min(max(i + 1, 0), target_layers - 1) for i in outputs)
        return {"taps": taps, "mask_token_id": min(QWEN3_MASK, vocab_size - 1)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **overrides: Any) -> Self:
        """Read the raw public form.

        Raises:
            ConfigError: a size is missing, an override is unknown, or blocks of the file are causal inside.
        """
        nested = raw.get("dflash_config") or {}
        causal = raw.get("is_causal", nested.get("causal"))
        if causal is None and SLIDING in (raw.get("layer_types") or ()):
            causal = raw.get("sliding_window_non_causal") is not True  # as readers take it
        if causal not in (None, False):
            raise ConfigError(
                f"{cls.family}: the file's blocks are causal inside: it says so, or has {SLIDING!r} layers and does "
                "not say otherwise; here a slot sees its whole block. Where the draft was trained that way, write "
                "is_causal: false into its config.json"
            )
        return super().from_dict(raw, **overrides)

    @classmethod
    def public_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Read features and mask wherever public files keep them."""
        nested = raw.get("dflash_config") or {}
        fields: dict[str, Any] = {}
        if set(raw.get("layer_types") or ()) <= {FULL}:
            fields["layer_types"] = (
                None  # as every file without sliding layers says, in one way or another
            )
        outputs = nested.get("target_layer_ids") or raw.get("target_layer_ids")
        if outputs is not None:
            fields["taps"] = taps_of_outputs(outputs)
        for name in ("mask_token_id", "sample_from_anchor"):
            value = nested.get(name, raw.get(name))
            if value is not None:
                fields[name] = value
        return fields

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form."""
        values = super().to_dict(dtype)
        nested = {
            "mask_token_id": values.pop("mask_token_id"),
            "target_layer_ids": outputs_of_taps(self.taps),
        }
        del values["taps"]
        kinds = list(self.layer_types or (FULL,) * self.num_hidden_layers)
        if SLIDING in kinds:
            nested["causal"] = False
        return {
            "architectures": ["DFlashDraftModel"],
            **values,
            "layer_types": kinds,
            "num_aux_hidden_states": len(self.taps),
            "sliding_window_non_causal": True,
            "dflash_config": nested,
        }


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """What a `DSpark` is made of."""

    block_size: int = 7
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    """The confidence head also reads the previous token's vector."""
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    teacher_law: str = "whole"
    """What L1 and the confidence head are held to over a reduced vocabulary: the target's "whole" law, where tokens
    that the draft does not know are never accepted, or that of the "draft"'s tokens (as speculators has it)."""

    family: ClassVar[str] = "DSpark"
    counted: ClassVar[tuple[str, ...]] = ("block_size", "anchors_per_document", "markov_rank")
    loss_types: ClassVar[tuple[str, ...]] = ("label",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose("teacher_law", "whole", "draft")
        if self.markov_head_type not in MARKOV_HEADS:
            raise self.error(
                f"markov_head_type must be one of {', '.join(MARKOV_HEADS)}, found {self.markov_head_type!r}"
            )

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form, all at top level."""
        values = super().to_dict(dtype)
        nested = values.pop("dflash_config")
        if "causal" in nested:  # where there is no dflash_config, engines look for this name
            nested["is_causal"] = nested.pop("causal")
        return {
            **values,
            **nested,
            "architectures": ["Qwen3DSparkModel"],
        }

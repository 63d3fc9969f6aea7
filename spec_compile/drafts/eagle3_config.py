"""Sizes and options of an EAGLE-3 draft, and their public form in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from spec_compile.errors import ConfigError

from .config import (
    DraftConfig,
    check_draft_vocab,
    check_layer_types,
    check_taps,
    eagle_taps,
    public_eagle_taps,
)
from .objective import check_loss


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """What an `Eagle3` is made of. Field names are those of public checkpoints where they have one.

    Raises:
        ConfigError: a value is out of range, or not known.
    """

    taps: tuple[int, ...]
    """Features, "after i layers" (0 is the embeddings), in the order in which ``fc`` reads them."""
    draft_vocab_size: int | None = None
    """Tokens that the draft can propose; None means all of the target's."""
    loss: str = "ce"
    """Soft cross-entropy "ce", "kl", "tv", "lk" or "lk_hybrid"; over the draft's vocabulary the target's law is
    renormalised, but for the acceptance probability in the last three."""
    lk_scale: float = 1.0
    lk_decay: float = 1.0
    """The hybrid's weight on KL is ``lk_scale * exp(-lk_decay * acceptance)``."""
    skip_unknown: bool = True
    """Rows whose likeliest token is not in the draft's vocabulary have no loss (they count all the same)."""
    layer_types: tuple[str, ...] | None = None
    """"full_attention" or "sliding_attention" for each layer; None means all full."""
    sliding_window: int | None = None
    """Step-0 rows that a sliding layer sees, its own included; keys of later steps are always seen."""
    ttt_length: int = 4
    loss_decay: float = 0.8
    """Weight of step k's loss is ``loss_decay ** k``."""
    loss_mask_of: str = "predicted"
    """Whose mask decides whether row t counts at step k: the "predicted" token t+2+k, the "embedded" one t+1+k (as
    speculators has it), or the "previous" one t+k (as EAGLE and SpecForge have it)."""
    loss_mean_over: str = "valid"
    """What a step's loss is divided by: the "valid" rows, or all "rows" (as EAGLE and SpecForge have it)."""
    norm_before_residual: bool = False
    """The residual into attention is the normed hidden state."""
    norm_before_fc: bool = False
    """One RMSNorm over all features."""
    fc_norm: bool = False
    """One RMSNorm for each feature."""
    norm_output: bool = False
    """The recurrent state is the normed one (EAGLE 3.1)."""
    head_norm: bool = True
    """The head reads the normed state; False is SpecForge's ``norm_output=False``, which no engine serves."""

    family: ClassVar[str] = "Eagle3"
    counted: ClassVar[tuple[str, ...]] = ("ttt_length",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", check_taps(self, self.taps))
        self.choose("loss_mask_of", "predicted", "embedded", "previous")
        self.choose("loss_mean_over", "valid", "rows")
        super().__post_init__()
        if self.draft_vocab_size is None:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        check_draft_vocab(self)
        check_layer_types(self)
        check_loss(self)
        if self.norm_before_fc and self.fc_norm:
            raise self.error("norm_before_fc and fc_norm exclude each other; choose one")
        if self.norm_output and not self.head_norm:
            raise self.error("norm_output norms what the head reads too; leave head_norm=True")

    @property
    def num_features(self) -> int:
        """Width of ``inputs.features``, m * D_t."""
        return len(self.taps) * self.target_hidden_size

    @classmethod
    def defaults_for(
        cls, target_layers: int, vocab_size: int, overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Three features, from low, middle and high layers."""
        return {"taps": eagle_taps(target_layers)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **overrides: Any) -> Self:
        """Read the raw public form.

        Raises:
            ConfigError: a size is missing, an override is unknown, or ``norm_output`` has two meanings.
        """
        if raw.get("norm_output") is False and not {"head_norm"} & {*raw, *overrides}:
            raise ConfigError(
                f"{cls.family}: the file says norm_output=false, by which SpecForge means that the head reads a state "
                "without norm, and engines that the recurrent state has none; pass head_norm=False or head_norm=True"
            )
        return super().from_dict(raw, **overrides)

    @classmethod
    def public_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Read the features, and the kind of heads from the architecture."""
        qwen = "Eagle3Qwen3ForCausalLM" in (raw.get("architectures") or ())
        return {**public_eagle_taps(raw), "qk_norm": raw.get("qk_norm", qwen)}

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form; keys that only this package reads are harmless to others.

        Raises:
            ConfigError: no form has a head without a norm in front of it.
        """
        if not self.head_norm:
            raise self.error(
                "head_norm=False has no public form: engines norm what the head reads; save the module that it came "
                "from, or the state dict"
            )
        values = super().to_dict(dtype)
        taps = list(values.pop("taps"))
        return {
            "architectures": [
                "Eagle3Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLMEagle3"
            ],
            **values,
            "eagle_aux_hidden_state_layer_ids": taps,
            "num_aux_hidden_states": len(taps),
        }

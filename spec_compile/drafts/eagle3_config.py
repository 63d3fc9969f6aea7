"""Sizes and options of an EAGLE-3 draft, and their public form in ``config.json``."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from spec_compile.errors import ConfigError

from . import rope
from .layers import activation

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """What an `Eagle3` is made of. Field names are those of public checkpoints where they have one.

    Raises:
        ConfigError: a value is out of range, or not supported yet.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    """Features, "after i layers" (0 is the embeddings), in the order in which ``fc`` reads them."""
    draft_vocab_size: int | None = None
    """None means the whole vocabulary, the only size supported now."""
    ttt_length: int = 4
    loss_decay: float = 0.8
    """Weight of step k's loss is ``loss_decay ** k``."""
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    """Biases on q, k, v and o."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys (the Qwen3 variant)."""
    norm_before_residual: bool = False
    """The residual into attention is the normed hidden state."""
    norm_before_fc: bool = False
    """One RMSNorm over all features."""
    fc_norm: bool = False
    """One RMSNorm for each feature."""
    norm_output: bool = False
    """The recurrent state is the normed one (EAGLE 3.1)."""
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(int(tap) for tap in self.taps))
        for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "ttt_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Eagle3: {name} must be at least 1, found {getattr(self, name)}")
        if not self.taps or min(self.taps) < 0:
            raise ConfigError(
                f"Eagle3: taps must be one or more layer counts >= 0, found {self.taps}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"Eagle3: num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"Eagle3: RoPE needs an even head_dim, found {self.head_dim}")
        if self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"Eagle3: hidden_size={self.hidden_size} must equal the target's "
                f"{self.target_hidden_size}, because the draft reads the target's own embeddings"
            )
        if self.draft_vocab_size is None:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        if self.draft_vocab_size != self.vocab_size:
            raise ConfigError(
                f"Eagle3: draft_vocab_size={self.draft_vocab_size} below the target's "
                f"{self.vocab_size} is not supported yet; leave it None"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("Eagle3: norm_before_fc and fc_norm exclude each other; choose one")
        activation(self.hidden_act)
        rope.check_scaling(self.rope_scaling)

    @property
    def num_features(self) -> int:
        """Width of ``inputs.features``, m * D_t."""
        return len(self.taps) * self.target_hidden_size

    @classmethod
    def from_target(cls, config: Any, *, vocab_size: int, **overrides: Any) -> Self:
        """Derive sizes and RoPE from a transformers configuration.

        Raises:
            ConfigError: fewer than 2 layers, or an unknown override.
        """
        text = config.get_text_config()
        layers, dim, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        if layers < 2:
            raise ConfigError(f"Eagle3 needs a target with 2 or more layers, found {layers}")
        theta, scaling = _rope_of(text)
        defaults = {
            "hidden_size": dim,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * dim,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or dim // heads,
            "vocab_size": vocab_size,
            "target_hidden_size": dim,
            "taps": tuple(min(max(i, 0), layers - 1) for i in (2, layers // 2, layers - 3)),
            "hidden_act": getattr(text, "hidden_act", None) or "silu",
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
            "initializer_range": getattr(text, "initializer_range", None) or 0.02,
        }
        return cls._from(defaults, overrides)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **overrides: Any) -> Self:
        """Read the raw public form.

        Raises:
            ConfigError: a size is missing, or an override is unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in raw.items() if name in known and value is not None}
        nested = raw.get("eagle_config") or {}
        taps = raw.get("eagle_aux_hidden_state_layer_ids")
        taps = taps or nested.get("eagle_aux_hidden_state_layer_ids")
        if taps:
            values["taps"] = tuple(taps)
        values["rope_theta"], values["rope_scaling"] = _rope_of(raw)
        values.setdefault("target_hidden_size", values.get("hidden_size"))
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        if "head_dim" not in values and "num_attention_heads" in values and "hidden_size" in values:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        values.setdefault("qk_norm", "Eagle3Qwen3ForCausalLM" in (raw.get("architectures") or ()))
        return cls._from(values, overrides)

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form; keys that only this package reads are harmless to others."""
        values = dataclasses.asdict(self)
        taps = list(values.pop("taps"))
        scaling = values.pop("rope_scaling")
        return {
            "architectures": [
                "Eagle3Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLMEagle3"
            ],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
            **values,
            "rope_scaling": None if scaling is None else dict(scaling),
            "eagle_aux_hidden_state_layer_ids": taps,
            "num_aux_hidden_states": len(taps),
        }

    def without_vocabulary_maps(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Drop tensors that a whole-vocabulary draft on the target's embeddings does not hold.

        Raises:
            ConfigError: a map is not the identity.
        """
        kept = dict(tensors)
        offsets = kept.pop("d2t", None)
        if offsets is not None and bool(offsets.any()):
            raise ConfigError(
                "Eagle3: the checkpoint's d2t maps a reduced vocabulary; not supported yet"
            )
        kept.pop("t2d", None)
        if kept.pop("embed_tokens.weight", None) is not None:
            log.warning(
                "the checkpoint's own embed_tokens is left out: the target's is used instead"
            )
        return kept

    @classmethod
    def _from(cls, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Self:
        fields = dataclasses.fields(cls)
        known = [field.name for field in fields]
        for name in overrides:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"Eagle3: unknown option {name!r}; {hint}")
        merged = {**values, **overrides}
        required = [field.name for field in fields if field.default is dataclasses.MISSING]
        missing = [name for name in required if merged.get(name) is None]
        if missing:
            raise ConfigError(f"Eagle3: the configuration lacks {', '.join(missing)}; pass them")
        return cls(**merged)


def _rope_of(config: Any) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of a configuration, whichever of the public spellings it uses."""
    given = config if isinstance(config, Mapping) else vars(config)
    new = given.get("rope_parameters") or {}
    new = new.get("full_attention") or new  # one mapping for each type of layer
    theta = new.get("rope_theta") or given.get("rope_theta") or 10000.0
    scaling = dict(given.get("rope_scaling") or new)
    kind = rope.rope_type(scaling)
    if kind == "default":
        return float(theta), None
    if kind not in rope.NEEDED:
        log.warning("the draft uses plain RoPE: scaling %r of the target is not known here", kind)
        return float(theta), None
    for key in ("rope_theta", "partial_rotary_factor", "type"):
        scaling.pop(key, None)
    if "original_max_position_embeddings" in rope.NEEDED[kind]:
        scaling.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    return float(theta), {**scaling, "rope_type": kind}

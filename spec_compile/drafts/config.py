"""Sizes and options that drafts share, and how they are read from and written to ``config.json``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from spec_compile.errors import ConfigError, PlanError, did_you_mean

from . import rope
from .field_types import check_types
from .layers import activation

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Sizes of a draft. Field names are those of public checkpoints where they have one.

    Raises:
        ConfigError: a value is out of range, or not known.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    """Biases on q, k, v and o."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys."""
    initializer_range: float = 0.02

    family: ClassVar[str] = "draft"
    """Name in messages."""
    counted: ClassVar[tuple[str, ...]] = ()
    """Further fields that must be at least 1."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Further fields that must be above 0."""

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "vocab_size", "num_hidden_layers",
        )  # fmt: skip
        for name in (*sizes, *self.counted):
            if getattr(self, name) < 1:
                raise self.error(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise self.error(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise self.error(f"RoPE needs an even head_dim, found {self.head_dim}")
        if self.hidden_size != self.target_hidden_size:
            raise self.error(
                f"hidden_size={self.hidden_size} must equal the target's {self.target_hidden_size}, "
                "because the draft reads the target's own embeddings"
            )
        for name in ("rope_theta", "max_position_embeddings", *self.positive):
            if getattr(self, name) <= 0:
                raise self.error(f"{name} must be above 0, found {getattr(self, name)}")
        for name in ("rms_norm_eps", "initializer_range"):
            if getattr(self, name) < 0:
                raise self.error(f"{name} must not be negative, found {getattr(self, name)}")
        activation(self.hidden_act)
        rope.check_scaling(self.rope_scaling)

    def error(self, message: str) -> ConfigError:
        """An error that names the family."""
        return ConfigError(f"{self.family}: {message}")

    @classmethod
    def whole_vocabulary(cls) -> ConfigError:
        """The error for a reduced vocabulary where the family has none."""
        return ConfigError(
            f"{cls.family} has no reduced vocabulary: it proposes with the target's own head; leave draft_vocab and "
            "draft_vocab_size out, or choose another family"
        )

    def choose(self, name: str, *allowed: str) -> None:
        """Refuse a value of a switch that is not one of its own.

        Raises:
            ConfigError: names the switch, its value and the allowed ones.
        """
        if getattr(self, name) not in allowed:
            raise self.error(
                f"{name} must be one of {', '.join(allowed)}, found {getattr(self, name)!r}"
            )

    @classmethod
    def from_target(cls, config: Any, *, vocab_size: int, **overrides: Any) -> Self:
        """Derive sizes and RoPE from a transformers configuration.

        Raises:
            ConfigError: fewer than 2 layers, or an unknown override.
            PlanError: a feature of a layer that does not exist.
        """
        text = config.get_text_config()
        layers, dim, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        if layers < 2:
            raise ConfigError(f"{cls.family} needs a target with 2 or more layers, found {layers}")
        theta, scaling = rope_of(text)
        kind = rope.rope_type(scaling)
        if kind not in rope.NEEDED:
            log.warning(
                "the draft uses plain RoPE: scaling %r of the target is not known here", kind
            )
            scaling = None
        defaults = {
            "hidden_size": dim,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * dim,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or dim // heads,
            "vocab_size": vocab_size,
            "target_hidden_size": dim,
            "hidden_act": getattr(text, "hidden_act", None) or "silu",
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
            "initializer_range": getattr(text, "initializer_range", None) or 0.02,
        }
        made = cls.checked(
            {**defaults, **cls.defaults_for(layers, vocab_size, overrides)}, overrides
        )
        taps: tuple[int, ...] = getattr(made, "taps", ())
        if any(tap >= layers for tap in taps):
            raise PlanError(
                f"{cls.family}: taps={taps}: {max(taps)} does not exist; expected 0 (embeddings) to {layers - 1} in "
                f"a target of {layers} layers"
            )
        return made

    @classmethod
    def defaults_for(
        cls, target_layers: int, vocab_size: int, overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The family's own fields for a target; overrides are given, some fields follow others."""
        return {}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **overrides: Any) -> Self:
        """Read the raw public form.

        Raises:
            ConfigError: a size is missing, an override is unknown, or the file rotates a part of each head.
        """
        rope_given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        part = raw.get("partial_rotary_factor", rope_given.get("partial_rotary_factor"))
        if part not in (None, 1):
            raise ConfigError(
                f"{cls.family}: the file says partial_rotary_factor={part!r}; drafts here rotate whole heads, "
                "and would compute something else from its weights"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in raw.items() if name in known and value is not None}
        values["rope_theta"], values["rope_scaling"] = rope_of(raw)
        values.setdefault("target_hidden_size", values.get("hidden_size"))
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        check_types(cls, {name: value for name, value in values.items() if value is not None})
        if "head_dim" not in values and "num_attention_heads" in values and "hidden_size" in values:
            values["head_dim"] = values["hidden_size"] // max(values["num_attention_heads"], 1)
        return cls.checked({**values, **cls.public_fields(raw)}, overrides)

    @classmethod
    def public_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The family's own fields where the public form spells them differently."""
        return {}

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form; keys that only this package reads are harmless to others."""
        values = dataclasses.asdict(self)
        scaling = values.pop("rope_scaling")
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "draft_vocab_size": self.vocab_size,
            **values,
            "rope_scaling": None if scaling is None else dict(scaling),
        }

    @classmethod
    def checked(cls, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Self:
        """Build from values and overrides; refuse unknown and missing names."""
        fields = dataclasses.fields(cls)
        known = [field.name for field in fields]
        for name in overrides:
            if name == "draft_vocab_size" and name not in known:
                raise cls.whole_vocabulary()
            if name not in known:
                hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
                raise ConfigError(f"{cls.family}: unknown option {name!r}{hint}")
        merged = {**values, **overrides}
        required = [field.name for field in fields if field.default is dataclasses.MISSING]
        missing = [name for name in required if merged.get(name) is None]
        if missing:
            raise ConfigError(
                f"{cls.family}: the configuration lacks {', '.join(missing)}; pass them"
            )
        check_types(cls, merged)
        return cls(**merged)


FULL, SLIDING = "full_attention", "sliding_attention"


def check_layer_types(config: Any) -> None:
    """Refuse layer types that are not known, too few or many, or sliding without a window.

    Raises:
        ConfigError: says which.
    """
    if config.layer_types is None:
        return
    kinds = tuple(config.layer_types)
    object.__setattr__(config, "layer_types", kinds)
    odd = set(kinds) - {FULL, SLIDING}
    if odd or len(kinds) != config.num_hidden_layers:
        raise config.error(
            f"layer_types must name {config.num_hidden_layers} of {FULL!r} and {SLIDING!r}, found {kinds}"
        )
    if SLIDING in kinds and (config.sliding_window is None or config.sliding_window < 1):
        raise config.error(f"{SLIDING!r} needs sliding_window, found {config.sliding_window!r}")


def windows(config: Any) -> tuple[int | None, ...]:
    """Give each layer's window, None where it sees everything."""
    kinds = config.layer_types or (FULL,) * config.num_hidden_layers
    return tuple(config.sliding_window if kind == SLIDING else None for kind in kinds)


def check_taps(config: DraftConfig, taps: tuple[int, ...]) -> tuple[int, ...]:
    """Layer counts as a tuple of ints.

    Raises:
        ConfigError: there is none, or one is negative.
    """
    listed = tuple(int(tap) for tap in taps)
    if not listed or min(listed) < 0:
        raise config.error(f"taps must be one or more layer counts >= 0, found {listed}")
    return listed


def eagle_taps(target_layers: int) -> tuple[int, ...]:
    """The three features of EAGLE-3, inside a small target too."""
    wanted = (2, target_layers // 2, target_layers - 3)
    return tuple(min(max(i, 0), target_layers - 1) for i in wanted)


def public_eagle_taps(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Features where public EAGLE-3 files keep them; nothing where they do not say."""
    nested = raw.get("eagle_config") or {}
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or nested.get("eagle_aux_hidden_state_layer_ids")
    return {"taps": tuple(ids)} if ids else {}


def check_draft_vocab(config: Any) -> None:
    """Refuse a draft vocabulary that is larger than the target's, or empty.

    Raises:
        ConfigError: it is.
    """
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise config.error(
            f"draft_vocab_size={config.draft_vocab_size} must be from 1 to the target's {config.vocab_size}"
        )


def rope_of(config: Any) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of a configuration, whichever of the public spellings it uses."""
    given = config if isinstance(config, Mapping) else vars(config)
    new = given.get("rope_parameters") or {}
    new = new.get("full_attention") or new  # one mapping for each type of layer
    theta = new.get("rope_theta") or given.get("rope_theta") or 10000.0
    scaling = dict(given.get("rope_scaling") or new)
    kind = rope.rope_type(scaling)
    if kind == "default":
        return theta, None
    for key in ("rope_theta", "partial_rotary_factor", "type"):
        scaling.pop(key, None)
    if "original_max_position_embeddings" in rope.NEEDED.get(kind, ()):
        scaling.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    return theta, {**scaling, "rope_type": kind}

"""The public form of the speculators package, to and from the raw one.

Sizes of the layers lie in ``transformer_layer_config``, options of the family at top level, and every option
whose default differs between readers is always written. Source: the package's configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_compile.errors import ConfigError

from .dialects import outputs_of_taps

MARK = "speculators_model_type"
LAYER = "transformer_layer_config"
EAGLE_TAPS, BLOCK_TAPS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "attention_bias", "initializer_range", "rope_theta", "rope_scaling",
    "tie_word_embeddings", "layer_types", "sliding_window",
)  # fmt: skip
EAGLE_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BLOCK_OPTIONS = ("block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
DSPARK_OPTIONS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "eagle3": (*EAGLE_OPTIONS, EAGLE_TAPS),
    "peagle": ("norm_before_residual", EAGLE_TAPS, "mask_token_id"),
    "dflash": (*BLOCK_OPTIONS, BLOCK_TAPS),
    "dspark": (*BLOCK_OPTIONS, BLOCK_TAPS, *DSPARK_OPTIONS),
}
ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "Qwen3DSparkModel",
}
ELSEWHERE = (
    EAGLE_TAPS, BLOCK_TAPS, "architectures", "torch_dtype", "dflash_config", "target_layer_ids",
    "pard_token", "parallel_drafting", "draft_vocab_size", "target_hidden_size", "causal",
    "is_causal", "num_aux_hidden_states",
)  # fmt: skip
"""What the raw form says that has another place or name here; other fields are harmless to readers."""
AMBIGUOUS = {
    "eagle3": "norm_before_residual",
    "dflash": "sample_from_anchor",
    "dspark": "sample_from_anchor",
}
"""What a file must say, because readers fill it in differently."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of this form."""
    return MARK in config


def from_raw(
    kind: str,
    raw: Mapping[str, Any],
    *,
    taps: tuple[int, ...],
    num_draft_tokens: int,
    verifier: str | None,
    verifier_architectures: tuple[str, ...],
) -> dict[str, Any]:
    """Write the raw form of a draft in this one.

    Args:
        kind: "eagle3", "peagle", "dflash" or "dspark".
        raw: the raw form.
        taps: of the draft.
        num_draft_tokens: which engines draft by default.
        verifier: name or path of the target.
        verifier_architectures: of the target.
    """
    flat = {**raw, EAGLE_TAPS: list(taps), BLOCK_TAPS: list(taps), **raw.get("dflash_config", {})}
    layer = {name: flat[name] for name in SIZES if flat.get(name) is not None}
    layer["rope_parameters"] = _rope(flat)
    if kind in ("dflash", "dspark"):
        layer["model_type"] = "qwen3"
    options = {name: flat[name] for name in OPTIONS[kind]}
    own = {name: flat[name] for name in flat if name not in (*SIZES, *ELSEWHERE)}
    return {
        MARK: kind,
        "architectures": [ARCHITECTURES[kind]],
        "torch_dtype": raw["torch_dtype"],
        "dtype": raw["torch_dtype"],
        "tie_word_embeddings": False,
        "draft_vocab_size": raw["draft_vocab_size"],
        "target_hidden_size": raw["target_hidden_size"],
        "num_aux_hidden_states": len(taps),
        **own,
        **options,
        LAYER: layer,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(verifier_architectures),
            },
        },
    }


def to_raw(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Read this form as a raw one.

    Args:
        config: of this form.
        given: what the caller says; it need not be in the file.

    Raises:
        ConfigError: the kind is unknown, or an option that readers fill in differently is missing.
    """
    kind = config[MARK]
    if not isinstance(kind, str) or kind not in OPTIONS:
        raise ConfigError(f"{MARK}={kind!r} is not known; expected one of {', '.join(OPTIONS)}")
    name = AMBIGUOUS.get(kind)
    if name is not None and config.get(name) is None and name not in given:
        raise ConfigError(
            f"{kind}: the file does not say {name}, which readers of this form fill in differently; pass {name}=..."
        )
    layer = dict(config.get(LAYER) or {})
    raw = {**layer, **{key: value for key, value in config.items() if key != LAYER}}
    raw["vocab_size"] = layer.get("vocab_size")
    if config.get(BLOCK_TAPS) is not None:
        raw["target_layer_ids"] = outputs_of_taps(config[BLOCK_TAPS])
    raw.setdefault("qk_norm", layer.get("model_type") == "qwen3")
    if kind == "eagle3":
        raw.setdefault("head_norm", True)
    return raw


def public_names(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as this form does: the first layer of EAGLE-3 is ``layers.0``."""
    if kind != "eagle3":
        return dict(tensors)
    return {name.replace("midlayer.", "layers.0.", 1): t for name, t in tensors.items()}


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(raw.get("rope_scaling") or {"rope_type": "default"})
    return {**scaling, "rope_theta": raw["rope_theta"]}

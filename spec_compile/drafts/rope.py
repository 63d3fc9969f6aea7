"""Rotary positions in the rotate-half (neox) layout, computed on the fly: no buffer to keep.

Legend: T rows, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ConfigError
from spec_compile.ir.dtypes import accumulator

Scaling = Mapping[str, Any]
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rotate(x: Tensor, positions: Tensor, theta: float, scaling: Scaling | None) -> Tensor:
    """Rotate each head of each row by its position.

    Args:
        x: [T, H, D].
        positions: int64 [T].
        theta: base of the frequencies.
        scaling: None, or a public ``rope_scaling`` mapping that `check_scaling` accepts.

    Returns:
        [T, H, D] in the type of ``x``.
    """
    dim, work = x.shape[-1], accumulator(x.dtype)
    inverse = theta ** -(torch.arange(0, dim, 2, device=x.device).to(work) / dim)
    inverse = _scaled(inverse, dim, theta, scaling)
    angle = positions.to(work)[:, None, None] * inverse
    factor = attention_factor(scaling)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    first, second = x.to(work).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_type(scaling: Scaling | None) -> str:
    """Name the kind of scaling under its old or new key."""
    scaling = scaling or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def check_scaling(scaling: Scaling | None) -> None:
    """Refuse a kind of scaling that `rotate` does not compute.

    Raises:
        ConfigError: the kind is unknown, or a number is missing.
    """
    kind = rope_type(scaling)
    if kind not in NEEDED:
        raise ConfigError(f"rope_scaling must be one of {', '.join(NEEDED)}, found {kind!r}")
    missing = [key for key in NEEDED[kind] if (scaling or {}).get(key) is None]
    if missing:
        raise ConfigError(f"rope_scaling of type {kind!r} needs {', '.join(missing)}")


def attention_factor(scaling: Scaling | None) -> float:
    """Give the factor on cos and sin; 1 for all but YaRN."""
    if scaling is None or rope_type(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temper(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return temper(mscale) / temper(all_dims) if mscale and all_dims else temper(1.0)


def _scaled(inverse: Tensor, dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    kind = rope_type(scaling)
    if scaling is None or kind == "default":
        return inverse
    if kind == "linear":
        return inverse / float(scaling["factor"])
    keep = (
        _llama3_keep(inverse, scaling)
        if kind == "llama3"
        else _yarn_keep(inverse, dim, theta, scaling)
    )
    factor = float(scaling["factor"])
    return inverse * (keep + (1 - keep) / factor)


def _llama3_keep(inverse: Tensor, scaling: Scaling) -> Tensor:
    """Share of each frequency left unscaled: 1 for short waves, 0 for long ones."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = inverse * float(scaling["original_max_position_embeddings"]) / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_keep(inverse: Tensor, dim: int, theta: float, scaling: Scaling) -> Tensor:
    """Share of each frequency left unscaled: a ramp between two numbers of turns."""

    def ramp_end(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = ramp_end(scaling.get("beta_fast") or 32), ramp_end(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = (torch.arange(dim // 2, device=inverse.device).to(inverse.dtype) - low) / width
    return 1 - ramp.clamp(0, 1)

"""Dropout that a target would have active; the graph has it off, and people are to hear of it."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from .target import TargetView

ATTENTION = "attention_dropout"
"""Name in configurations, for attention that reads it there."""


def active_dropout(model: Any) -> list[str]:
    """Name the modules in training mode that drop, alike ones once: "model.layers.*.attn (attention_dropout=0.5)"."""
    trunk = TargetView.of(model).trunk
    runs = set(trunk.modules())
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        if module not in runs or not module.training:
            continue
        where = re.sub(r"\b\d+\b", "*", path) or type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                found[f"{where} (p={module.p:g})"] = None
            continue
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                found[f"{where} ({name}={value:g})"] = None
    rate = getattr(model.config.get_text_config(), ATTENTION, 0.0)
    known = any(ATTENTION in name or "attn" in name for name in found)
    if trunk.training and isinstance(rate, float) and rate > 0 and not known:
        found[f"config.{ATTENTION}={rate:g}"] = None
    return list(found)

"""Adaptor for rotary embeddings with three position axes: text has the same position on all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "recomposition_frequencies"


def install(model: nn.Module) -> None:
    """Let the rotary embeddings of a (copied) model read the first axis, where that is proved to be the same.

    Their own recomposition writes the other axes into views of the first, which no graph of values can hold.
    """
    for module in model.modules():
        if hasattr(module, "mrope_section") and _reads_one_axis(module):
            setattr(module, NAME, first_axis)


def first_axis(freq: Tensor) -> Tensor:
    """Angles [3, B, T, D / 2] that agree on all axes -> [B, T, D]."""
    return torch.cat((freq[0], freq[0]), -1)


def _reads_one_axis(module: Any) -> bool:
    """Whether the module's recomposition of equal axes gives what `first_axis` gives, tried on numbers."""
    if not hasattr(module, NAME) or not isinstance(getattr(module, "inv_freq", None), Tensor):
        return False
    width = module.inv_freq.shape[-1]
    same = torch.arange(1.0, 2 * width + 1, device="cpu").reshape(1, 1, 2, width).repeat(3, 1, 1, 1)
    expected = first_axis(same)
    found = getattr(module, NAME)(same.clone())
    return isinstance(found, Tensor) and torch.equal(found, expected)

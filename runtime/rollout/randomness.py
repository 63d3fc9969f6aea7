"""Uniform numbers that are a function of who asks for what, so batching cannot change them.

A sequence has a 64-bit key; a number depends on the key, the absolute position of the token that it
decides, and the purpose. The mixing function is the finaliser of SplitMix64.
Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a number decides; streams must be disjoint, or rejection sampling is biased."""

    PROPOSE = 1
    ACCEPT = 2
    DRAW = 3


def sequence_key(*words: int) -> int:
    """Mix any number of integers into one 64-bit key; order matters."""
    key = 0
    for word in words:
        key = int(_mix(np.array([(key ^ (word & WORD)) & WORD], dtype=np.uint64))[0])
    return key


def uniforms(keys: Sequence[int], positions: Tensor, purpose: Purpose) -> Tensor:
    """Give one number in [0, 1) for each position.

    Args:
        keys: one a sequence, B in all.
        positions: int64 [B, n], of the tokens that are decided.
        purpose: names the stream.

    Returns:
        fp64 [B, n], on the device of ``positions``.
    """
    rows = np.array(keys, dtype=np.uint64)[:, None]
    where = positions.cpu().numpy().astype(np.uint64)
    bits = _mix(_mix(rows ^ _mix(where)) ^ np.uint64(purpose))
    numbers = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(numbers).to(positions.device)


def _mix(x: Any) -> Any:
    """Map uint64 to uint64, one to one, each input bit reaching every output bit."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

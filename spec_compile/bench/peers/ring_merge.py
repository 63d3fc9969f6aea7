"""The running merge of ring-flash-attention: a new tile into fp32 sums."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def join(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join a tile to the running (out [R, H, D], lse [R, H]); returns both in their dtype.

    On a GPU it runs as a script whose pointwise chain is fused, as published. Source: the sigmoid form of
    ring-flash-attention's update.
    """
    if out.is_cuda:
        result: tuple[Tensor, Tensor] = _scripted()(out, lse, block_out, block_lse)
        return result
    return _join(out, lse, block_out, block_lse)


def _join(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    block_out = block_out.to(out.dtype)
    out = out - torch.sigmoid(block_lse - lse)[..., None] * (out - block_out)
    return out, lse - F.logsigmoid(lse - block_lse)


@functools.cache
def _scripted() -> Callable[..., tuple[Tensor, Tensor]]:
    with warnings.catch_warnings():
        # newer torch calls scripting deprecated; it is what the published code uses
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Callable[..., tuple[Tensor, Tensor]] = torch.jit.script(_join)
    return scripted

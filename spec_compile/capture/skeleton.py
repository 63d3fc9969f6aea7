"""Copies of modules that share storage with the originals: what capture may change and hook at will."""

from __future__ import annotations

import copy

import torch
from torch import nn

from spec_compile.errors import CaptureError


def skeleton(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a deep copy whose parameters and buffers are new objects over the original storage.

    Args:
        module: left untouched.
        dtype: compute type; floating parameters then become uninitialised tensors of that type,
            because only shapes and types matter to a capture.

    Raises:
        CaptureError: the module cannot be copied, for instance because it holds a non-leaf tensor.
    """
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        data = parameter.detach()
        if dtype is not None and data.is_floating_point() and data.dtype != dtype:
            data = torch.empty_like(data, dtype=dtype)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} could not be copied for capture ({error}); modules may hold parameters, "
            "buffers and plain values only"
        ) from error

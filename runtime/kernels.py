"""Register every lowered operator, and name the kernels that will serve them."""

from __future__ import annotations

import torch

from spec_compile.codegen.triton_mode import triton_mode

from . import anchor_rows, gathered, label_losses, law_losses, row_shift, rows, tap_ops, vocabulary
from .attention import context as attention_context
from .attention.backends import backend_for, fallbacks
from .attention.merges import merge_backend

REGISTERED = (
    rows, gathered, anchor_rows, label_losses, law_losses, row_shift, tap_ops, vocabulary,
    attention_context,
)  # fmt: skip
"""Importing these modules defines their operators in ``torch.ops.spec_compile``."""

__all__ = ["REGISTERED", "attention_kernel", "fallbacks", "loss_kernel", "merge_kernel"]

_LATER = "chosen when weights exist"
_TRITON = {
    "triton": "generated Triton kernel",
    "triton-interpreted": "generated Triton kernel under the interpreter (slow, for tests)",
}


def attention_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, requested: str
) -> str:
    """Name of the attention backend that serves these tensors; a meta device is served as its kind would be."""
    if device.type == "meta":
        return _LATER
    return backend_for(device, dtype, head_dim, value_dim, requested)


def merge_kernel(device: torch.device) -> str:
    """How partials are merged on a device."""
    if device.type == "meta":
        return _LATER
    return _TRITON.get(
        merge_backend(device), "aten fallback (no GPU: the generated Triton kernel is not used)"
    )


def loss_kernel(device: torch.device) -> str:
    """How losses over the vocabulary are computed on a device, between their matrix products."""
    if device.type == "meta":
        return _LATER
    missing = "no GPU" if device.type == "cpu" else f"no Triton for {device.type}"
    return _TRITON.get(triton_mode(device.type) or "", f"plain tensor code ({missing})")

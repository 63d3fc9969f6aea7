"""The gated delta rule over packed rows: linear attention whose state starts anew with each document.

Legend: T rows, H heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

RULE = "torch_chunk_gated_delta_rule"
"""What transformers calls its own implementation, a fused kernel where one is installed."""


@torch.library.custom_op("spec_compile::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    document: Tensor,
    normalize: bool,
    home: str,
) -> Tensor:
    """Run the target's own rule on each document by itself.

    Args:
        query: [1, T, H, D].
        key: [1, T, H, D].
        value: [1, T, H, Dv].
        decay: [1, T, H], logarithms.
        beta: [1, T, H].
        document: int64 [T], ascending.
        normalize: whether queries and keys are brought to length 1.
        home: module of the target's class, in which `RULE` is.

    Returns:
        [1, T, H, Dv].
    """
    return _run([query, key, value, decay, beta], document, normalize, home)


@gated_delta_rule.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _run(inputs: list[Tensor], document: Tensor, normalize: bool, home: str) -> Tensor:
    rule = getattr(importlib.import_module(home), RULE)
    parts = [inputs[2][:, :0]]
    for low, high in _spans(document):
        query, key, value, decay, beta = (x[:, low:high] for x in inputs)
        out, _ = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=normalize)
        parts.append(out)
    return torch.cat(parts, 1)


def _spans(document: Tensor) -> Iterator[tuple[int, int]]:
    """Rows of each document that has some."""
    low = 0
    for length in document.unique_consecutive(return_counts=True)[1].tolist():
        yield low, low + length
        low += length


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.normalize, ctx.home = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Run the rule again with gradients: it is the target's, so its formula is not known here."""
    *tensors, document = ctx.saved_tensors
    needed = ctx.needs_input_grad[: len(tensors)]
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(n) for x, n in zip(tensors, needed, strict=True)]
        out = _run(inputs, document, ctx.normalize, ctx.home)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
    return (*(next(found) if n else None for n in needed), None, None, None)


gated_delta_rule.register_autograd(_backward, setup_context=_setup)

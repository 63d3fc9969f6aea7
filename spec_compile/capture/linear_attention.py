"""Adaptor for hybrid targets (Qwen3-Next, Qwen3.5): their linear attention over packed documents.

The layers call two functions of their modeling module: a short causal convolution and the gated delta
rule. On a copied model both are exchanged for forms that know where documents begin; the first is made
of `shift`, the second is one declared node.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.errors import CaptureError
from spec_compile.ir import ops
from spec_compile.ir.linear_attention import RULE, gated_delta_rule
from spec_compile.ir.meta import user_line

from .attention import row_vectors

CONVOLUTION = "causal_conv1d_fn"


def install(model: nn.Module) -> None:
    """Let the linear-attention layers of a (copied) model see documents."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, types.FunctionType) and RULE in forward.__code__.co_names:
            module.forward = types.MethodType(_rebound(forward), module)


def _rebound(forward: types.FunctionType) -> types.FunctionType:
    """The same function, with other globals under the two names."""
    exchanged = {CONVOLUTION: convolution, RULE: _rule(forward.__module__)}
    body = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, **exchanged},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    body.__kwdefaults__ = forward.__kwdefaults__
    return body


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **unused: Any,
) -> Tensor:
    """Causal convolution of each channel inside documents: x [1, C, T], weight [C, K]."""
    document, _ = row_vectors()
    rows = x.squeeze(0).transpose(0, 1)
    last = weight.shape[1] - 1
    out = rows * weight[:, last]
    for back in range(1, last + 1):
        out = out + ops.shift(rows, -back, document) * weight[:, last - back]
    if bias is not None:
        out = out + bias
    if activation not in (None, "silu", "swish"):
        raise CaptureError(
            f"{user_line()}\n  a linear-attention layer has the activation {activation!r} after its convolution; only "
            "silu is known: use it, or a target without such layers"
        )
    out = out if activation is None else F.silu(out)
    return out.transpose(0, 1).unsqueeze(0)


def _rule(home: str) -> Any:
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        document, _ = row_vectors()
        inputs = (query, key, value, g, beta)
        out: Tensor = gated_delta_rule(*inputs, document, use_qk_l2norm_in_kernel, home)
        return out, None

    return rule

"""Compute gradients of weights apart from the backward that the previous stage waits for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from spec_compile.ir.edit import attribute

from .context import current

LINEAR = torch.ops.aten.linear.default
CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


class WeightGradient(NamedTuple):
    """What the gradient of a linear layer's weight is made of."""

    parameter: Tensor
    inputs: Tensor
    """[..., in features]."""
    grad: Tensor
    """Of the outputs, [..., out features]."""

    def compute(self) -> Tensor:
        """The gradient, [out features, in features], in the type of the activations."""
        return self.grad.flatten(0, -2).t() @ self.inputs.flatten(0, -2)

    def add(self) -> None:
        """Add it to the parameter's ``.grad``."""
        grad = self.compute().to(self.parameter.dtype)
        held = self.parameter.grad
        self.parameter.grad = grad if held is None else held.add_(grad)


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward leaves the gradient of its weight to the bound context's list."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameter: nn.Parameter
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.later = parameter, current().weight_gradients
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        whole = None
        if of_weight:
            made_of = WeightGradient(ctx.parameter, x.detach(), grad.detach())
            if ctx.later is None:
                whole = made_of.compute()
            else:
                ctx.later.append(made_of)
        return (
            grad @ weight if of_x else None,
            whole,
            grad.flatten(0, -2).sum(0) if of_bias else None,
            None,
        )


def split_linear(
    x: Tensor, weight: Tensor, parameter: nn.Parameter, bias: Tensor | None = None
) -> Tensor:
    """``linear(x, weight, bias)``, where ``weight`` is ``parameter``, possibly cast."""
    if not torch.is_grad_enabled():
        return torch.nn.functional.linear(x, weight, bias)
    out: Tensor = _SplitLinear.apply(x, weight, bias, parameter)  # type: ignore[no-untyped-call]
    return out


def split_weights(gm: GraphModule) -> GraphModule:
    """``linear(x, w)`` becomes ``split_linear(x, w, w)`` where w is a parameter.

    All matrices of a decoder layer, that is; gradients of norms, biases, embedding and head are
    computed with those of activations.
    """
    graph, table = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        source = _parameter(node.args[1], gm) if node.target == LINEAR else None
        if source is None:
            table[node] = graph.node_copy(node, lambda n: table[n])
            continue
        x, weight, *bias = (table[a] if isinstance(a, Node) else a for a in node.args)
        table[node] = graph.call_function(split_linear, (x, weight, table[source], *bias))
        table[node].meta.update(node.meta)
    result = GraphModule(gm, graph, class_name=type(gm).__name__)
    result.meta.update(gm.meta)
    result.graph.lint()
    return result


def _parameter(node: Node, gm: GraphModule) -> Node | None:
    """The get_attr node of a parameter that ``node`` holds, possibly cast; None for anything else."""
    while node.target in CASTS:
        (node,) = node.all_input_nodes
    is_one = node.op == "get_attr" and isinstance(attribute(gm, str(node.target)), nn.Parameter)
    return node if is_one else None

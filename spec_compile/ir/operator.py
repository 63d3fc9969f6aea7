"""Operators written in Python, with little work of the host between a call and its body.

`torch.library.custom_op` makes the same operators, for exports and fake values too. But in every call it takes
lists of tensors apart and together again as trees, several times, and passes by Dynamo: about 100 us in forward
and backward of one attention, whose own kernels may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import InvariantError

Body = Callable[..., Any]

NAMESPACE = "spec_compile"
BODIES: dict[str, Body] = {}
"""By qualified name."""

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")
_after_autograd: Any = torch._C._after_autograd_keyset
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_any_requires_grad: Any = torch._C._any_requires_grad


class Operator:
    """One operator; it is called as ``torch.ops.spec_compile.<name>``, or as the body was.

    The body runs on any device and without autograd. It changes none of its arguments, and returns tensors
    that share no memory with them or each other.
    """

    def __init__(self, name: str, body: Body) -> None:
        schema = torch.library.infer_schema(body, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, body, "CompositeExplicitAutograd")
        self.name = name
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.__doc__ = body.__doc__
        BODIES[f"{NAMESPACE}::{name}"] = body
        self._setup: Body | None = None
        self._backward: Body | None = None
        _library.impl(name, _autograd(self), "Autograd", with_keyset=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it through the dispatcher."""
        return self.overload(*args, **kwargs)

    def register_fake(self, body: Body) -> Body:
        """Take the body for fake values, which says shapes and dtypes."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", body, lib=_library)
        return body

    def register_autograd(self, backward: Body, *, setup_context: Body | None = None) -> None:
        """Take ``backward(ctx, *grads)``, one gradient an argument, and ``setup_context(ctx, inputs, output)``."""
        self._backward, self._setup = backward, setup_context

    def set_up(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keep for the backward what it needs."""
        if self._setup is not None:
            self._setup(ctx, inputs, output)

    def backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Any]:
        """Gradients of all arguments; a list for a list of tensors."""
        if self._backward is None:
            raise InvariantError(f"{self.name} has no gradient, but one came to it")
        found: Any = self._backward(ctx, *grads)
        return found if isinstance(found, tuple) else (found,)


def operator(name: str) -> Callable[[Body], Operator]:
    """Make an `Operator` of the function below, whose annotations are its schema."""
    return lambda body: Operator(name, body)


def _autograd(operator: Operator) -> Body:
    """What runs before the body: a node of the graph where a gradient may come, and nothing else."""
    overload, arguments = operator.overload, operator.overload._schema.arguments
    returns = overload._schema.returns
    returns_nothing = not returns
    returns_list = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)

    def forward(ctx: Any, keys: Any, inputs: tuple[Any, ...], *tensors: Any) -> Any:
        with _below_autograd():
            output = overload.redispatch(keys & _after_autograd, *inputs)
        # the dispatcher leaves out what equals a default
        missing = [a.default_value for a in arguments[len(inputs) :]]
        ctx.lengths = _lengths(inputs)
        with _ByArgument(ctx):
            operator.set_up(ctx, (*inputs, *missing), output)
        return tuple(output) if isinstance(output, list) else output

    def backward(ctx: Any, *grads: Any) -> Any:
        with _ByArgument(ctx):
            found = operator.backward(ctx, grads)
        if len(found) != len(arguments):
            raise InvariantError(
                f"the backward of {operator.name} must return one gradient an argument, {len(arguments)}, "
                f"found {len(found)}"
            )
        flat = _flat(found[: len(ctx.lengths)], ctx.lengths)
        if len(flat) != len(ctx.needs_input_grad) - 2:
            raise InvariantError(
                f"the backward of {operator.name} must return one gradient a tensor of a list, or None"
            )
        return (None, None, *flat)

    # autograd names its nodes after the class as it is made, and adds "Backward"
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node: Any = type(operator.name, (torch.autograd.Function,), body)

    def call(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and not returns_nothing and _any_requires_grad(*args):
            output = node.apply(keys, args, *_flat(args, _lengths(args)))
            return list(output) if returns_list else output
        with _below_autograd():
            return overload.redispatch(keys & _after_autograd, *args)

    return call


class _ByArgument:
    """Let ``ctx.needs_input_grad`` have one entry an argument, a list for a list, meanwhile."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self._needed = ctx, ctx.needs_input_grad

    def __enter__(self) -> None:
        self._ctx.needs_input_grad = _nested(self._needed[2:], self._ctx.lengths)

    def __exit__(self, *error: object) -> None:
        self._ctx.needs_input_grad = self._needed


def _lengths(values: Sequence[Any]) -> list[int | None]:
    """Of the lists among the values; None for what is no list."""
    return [len(x) if isinstance(x, list) else None for x in values]


def _flat(values: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    """Lists among the values taken apart; None for a list stands for as many."""
    flat: list[Any] = []
    for value, length in zip(values, lengths, strict=True):
        if length is None:
            flat.append(value)
        else:
            flat.extend([None] * length if value is None else value)
    return flat


def _nested(flat: Sequence[Any], lengths: Sequence[int | None]) -> tuple[Any, ...]:
    """Undo `_flat`."""
    if not any(length is not None for length in lengths):
        return tuple(flat)
    nested: list[Any] = []
    at = 0
    for length in lengths:
        nested.append(flat[at] if length is None else list(flat[at : at + length]))
        at += 1 if length is None else length
    return tuple(nested)

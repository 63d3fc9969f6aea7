"""Gather rows of all ranks into packed order; the gradient is one sum over all who read them.

Without that sum autograd would hold a gradient of all rows for each reader: the passes of a
training-time test all read the same keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import InvariantError
from spec_compile.ir.operator import operator

from .attention.parts import Sum
from .context import current
from .fabric import Fabric


class SharedSum:
    """The running sum of gradients of one gathered tensor; empty until a backward comes."""

    def __init__(self) -> None:
        self._sum: Sum | None = None
        self._backward = -1

    def begun(self, like: Tensor) -> Sum:
        """The sum, to which every reader adds; it settles what it added, but for parts of few rows."""
        backward = torch._C._current_graph_task_id()
        if self._sum is None or self._backward != backward:
            self._sum, self._backward = Sum(like), backward
        return self._sum

    def take(self) -> Tensor | None:
        """What this backward added, or None; one by other inputs alone may have left something behind."""
        found, self._sum = self._sum, None
        if found is None or self._backward != torch._C._current_graph_task_id():
            return None
        return found.result()


def shared_sum(x: Tensor) -> SharedSum | None:
    """The sum that ``x``'s gradients go to, where ``x`` comes right out of `gather_packed`."""
    found: SharedSum | None = getattr(x.grad_fn, "shared_sum", None)
    return found


@operator("gather_packed")
def gather_packed(x: Tensor, slots: Tensor, fabric: str) -> Tensor:
    """All ranks' rows by packed row; the gradient is summed over ranks.

    Args:
        x: [n, ...], own rows.
        slots: int64 [cp * n], the packed row at each slot.
        fabric: name of the cp group.

    Returns:
        [cp * n, ...].
    """
    rows = current().fabrics[fabric].all_gather(x).flatten(0, 1)
    # every row comes once: no atomics, two runs give the same bits
    return torch.empty_like(rows).index_copy_(0, slots, rows)


@gather_packed.register_fake
def _(x: Tensor, slots: Tensor, fabric: str) -> Tensor:
    return x.new_empty((slots.shape[0], *x.shape[1:]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, slots, ctx.name = inputs
    ctx.save_for_backward(slots)
    ctx.set_materialize_grads(False)
    ctx.shared_sum = SharedSum()
    try:
        ctx.fabric = current().fabrics[ctx.name]
    except InvariantError:
        # traced with fake values outside a bound model: such a graph is never run backward
        ctx.fabric = None


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    (slots,) = ctx.saved_tensors
    group: Fabric = ctx.fabric if ctx.fabric is not None else current().fabrics[ctx.name]
    shared = ctx.shared_sum.take()
    if shared is not None:
        grad = shared if grad is None else grad + shared
    if grad is None:
        return None, None, None
    # fabrics add halves in fp32, so only the result is rounded
    parts = grad.index_select(0, slots).unflatten(0, (group.size, -1))
    return group.reduce_scatter(parts), None, None


gather_packed.register_autograd(_backward, setup_context=_setup)

"""The two graph operators of a tap: both find this rank's channels in the bound context."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.errors import InvariantError
from spec_compile.ir.operator import operator

from .context import current


@operator("tap_send")
def tap_send(values: list[Tensor], source: int) -> None:
    """Publish the taps of stage ``source`` for the current micro-batch; nothing when nobody listens.

    A recompute of the surrounding graph runs inside an autograd task and sends nothing a second time.
    """
    context = current()
    if context.taps is not None and torch._C._current_graph_task_id() == -1:
        context.taps.push(source, context.micro_batch, values)


@tap_send.register_fake
def _(values: list[Tensor], source: int) -> None:
    return None


torch.fx.node.has_side_effect(torch.ops.spec_compile.tap_send.default)


@operator("tap_recv")
def tap_recv(like: Tensor, source: int, widths: list[int], dtypes: str) -> list[Tensor]:
    """Receive the taps of stage ``source`` for the current micro-batch: [rows of ``like``, width] each."""
    context = current()
    if context.taps is None:
        raise InvariantError("a draft that reads taps of other stages ran without tap channels")
    return context.taps.pull(source, context.micro_batch, shapes(like, widths, dtypes))


def shapes(like: Tensor, widths: list[int], dtypes: str) -> list[Tensor]:
    """Meta tensors that say what one push carries."""
    return [
        torch.empty(like.shape[0], width, dtype=getattr(torch, dtype), device="meta")
        for width, dtype in zip(widths, dtypes.split(","), strict=True)
    ]


@tap_recv.register_fake
def _(like: Tensor, source: int, widths: list[int], dtypes: str) -> list[Tensor]:
    return [
        like.new_empty(like.shape[0], width, dtype=getattr(torch, dtype))
        for width, dtype in zip(widths, dtypes.split(","), strict=True)
    ]


class HeldTaps:
    """A `TapPort` between stages that run one after the other on one rank: it hands values over."""

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = {}

    def push(self, source: int, micro_batch: int, values: list[Tensor]) -> None:
        """Keep the values until `pull`."""
        self._held[source] = [value.detach() for value in values]

    def pull(self, source: int, micro_batch: int, like: list[Tensor]) -> list[Tensor]:
        """Give them, of the shapes of ``like``; copies, as an operator may not return what it was given."""
        held = self._held.pop(source)
        return [value.reshape(x.shape).clone() for value, x in zip(held, like, strict=True)]

"""What the operators of a running graph look up by name: the fabrics and the tap channels of this rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from spec_compile.errors import InvariantError

from .fabric import Fabric


class TapPort(Protocol):
    """This rank's ends of the tap channels for one step."""

    def push(self, source: int, micro_batch: int, values: list[Tensor]) -> None:
        """Send the taps of stage ``source`` for one micro-batch."""

    def pull(self, source: int, micro_batch: int, like: list[Tensor]) -> list[Tensor]:
        """Receive them; ``like`` gives shapes and dtypes (meta tensors allowed)."""


@dataclass
class RunContext:
    """Bound to the running thread while a stage's graph runs, forward and backward."""

    fabrics: Mapping[str, Fabric]
    taps: TapPort | None = None
    """None: nobody consumes taps in this call, so tap_send publishes nothing."""
    micro_batch: int = 0
    weight_gradients: list[Any] | None = None
    """Where split linear layers leave what the gradients of their weights are made of; None: nowhere."""
    options: dict[str, str] = field(default_factory=dict)
    """Names of run-time choices, such as the attention backend."""


_local = threading.local()


@contextlib.contextmanager
def bind(context: RunContext) -> Iterator[RunContext]:
    """Make ``context`` current for this thread."""
    previous = getattr(_local, "context", None)
    _local.context = context
    try:
        yield context
    finally:
        _local.context = previous


def current() -> RunContext:
    """The bound context; an InvariantError outside `bind`."""
    context: RunContext | None = getattr(_local, "context", None)
    if context is None:
        raise InvariantError(
            "an operator of a lowered graph ran outside a bound model; call it through step()"
        )
    return context

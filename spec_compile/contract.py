"""What a draft is given and gives back, and what a policy loss sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Teacher(Protocol):
    """The target as a draft's teacher: hidden states and head, never logits."""

    @property
    def hidden(self) -> Tensor:
        """After the final norm, [T, D_t]."""

    @property
    def weight(self) -> Tensor:
        """The live output head, [V, D_t]."""


@dataclass(frozen=True)
class TeacherView:
    """The `Teacher` that the compiler hands to a draft: detached tensors of the target."""

    hidden: Tensor
    weight: Tensor


@dataclass(kw_only=True)
class DraftInputs:
    """One packed row of ``T`` tokens as a draft's training forward sees it; all detached from the target."""

    features: Tensor
    """[T, m * D_t]: the tapped residual streams, side by side in the order of ``taps``."""
    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: restart at 0 in each document."""
    document: Tensor
    """int64 [T]: number of the row's document."""
    index: Tensor
    """int64 [T]: the row's own index in the packed row."""
    loss_mask: Tensor
    """bool [T]: the token may be a target of the draft; False at first tokens."""
    embedding: Callable[[Tensor], Tensor]
    """ids [..] -> [.., D_t]: rows of the target's input embedding weight, frozen, without scale."""
    teacher: Teacher
    anchors: Tensor | None = None
    """None, or int64 [A]: row indices, ascending; -1 marks unused entries, last."""


@dataclass
class DraftOutput:
    """Raw sums over the rows of one packed row: scalars, or vectors [G] of equal length (per step or slot)."""

    loss_sum: Tensor
    count: Tensor
    """What the global sum is divided by, a constant of the gradient: one that carries a gradient is refused."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Further raw sums, scalars or [G]; reported divided by ``count``, but for ``acceptance``, which is divided by
    ``acceptance_count`` where there is one: the number, or weight, of what it sums over."""


class Fields(dict[str, Tensor]):
    """Per-token tensors by name; a name that is none of them is told which there are."""

    def __missing__(self, name: str) -> Tensor:
        known = ", ".join(self) or "none"
        raise KeyError(
            f"the batch has no field {name!r}; it has: {known}. Give it to PackedBatch in fields={{...}}"
        )


@dataclass(kw_only=True)
class TokenOutputs:
    """Whole documents of one micro-batch in packed order, the same on every cp rank; all vectors are [T].

    ``logprobs[t]`` and ``entropy[t]`` (nats) belong to the law of token ``t`` given the earlier tokens of its
    document under ``softmax(logits / temperature)``; both are 0 at first tokens. A loss that reads entropy costs one
    more pass over the logits' gradients, also times 0.
    """

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    tokens: Tensor
    document: Tensor
    cu_seqlens: Tensor
    fields: dict[str, Tensor]
    draft_loss: Tensor | None = None
    """Set by ``model(batch)`` only: global sum / global count, unweighted."""

    def __post_init__(self) -> None:
        self.fields = Fields(self.fields)

"""Packed batches: what the user hands in. Stores what it is given; `checked_batch` looks at it.

Legend: T rows of the packed row, N documents, B x S the padded form, A anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch_checks import check_cu_seqlens, need_tensor
from .errors import BatchError
from .options import refuse_unknown


@dataclass(frozen=True)
class Padding:
    """Where the rows of a packed row lie in the padded form that they came from."""

    rows: Tensor
    """int64 [T]: flat index into B * S."""
    shape: tuple[int, int]
    """(B, S)."""


@refuse_unknown(otherwise="per-token tensors of your own go into fields={..}")
@dataclass(eq=False)
class PackedBatch:
    """Documents laid end to end in one row of T tokens. Stores what it is given and never raises.

    Everything is aligned with the token itself; masks count as False at first tokens of documents.
    """

    tokens: Tensor
    """int64 [T]."""
    cu_seqlens: Tensor
    """Integer [N + 1]: from 0 to T, non-decreasing; document ``d`` is rows ``cu[d]:cu[d + 1]``."""
    loss_mask: Tensor
    """bool [T]: the token is in the policy loss."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token tensors [T, ...]: advantages, old_logprobs, the user's own."""
    draft_mask: Tensor | None = None
    """bool [T]: the token may be a target of the draft; None means ``loss_mask``."""
    anchors: Tensor | None = None
    """int64 [A]: rows for block drafts, ascending; -1 = unused, last. None: the library draws."""
    anchor_seed: int = 0
    padding: Padding | None = field(default=None, repr=False, kw_only=True)
    """Set by `from_padded`; `to_padded` goes back through it."""

    @classmethod
    def from_padded(
        cls, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, **fields: Tensor
    ) -> PackedBatch:
        """Pack padded rows; each row becomes one document, in order, also when it is empty.

        Args:
            input_ids: int64 [B, S].
            attention_mask: bool or 0 / 1 [B, S]: real tokens, in one piece; left or right padded.
            loss_mask: bool or 0 / 1 [B, S].
            fields: [B, S] or [B, S, ...].

        Raises:
            BatchError: a shape does not fit, a mask holds other numbers, or an attention mask has a hole.
        """
        need_tensor("input_ids", input_ids)
        if input_ids.ndim != 2:
            raise BatchError(f"input_ids must be [B, S], found shape {tuple(input_ids.shape)}")
        shape = (input_ids.shape[0], input_ids.shape[1])
        given = {"attention_mask": attention_mask, "loss_mask": loss_mask, **fields}
        for name, value in given.items():
            need_tensor(name, value)
            if tuple(value.shape[:2]) != shape:
                raise BatchError(
                    f"{name} must start with input_ids' shape {list(shape)}, "
                    f"found {list(value.shape)}"
                )
        real, valid = (_as_bool(name, given[name]) for name in ("attention_mask", "loss_mask"))
        lengths = _padded_lengths(real)
        rows = real.reshape(-1).nonzero()[:, 0]
        cu_seqlens = torch.zeros(shape[0] + 1, dtype=torch.int64, device=input_ids.device)
        cu_seqlens[1:] = lengths.cumsum(0)

        def pack(x: Tensor) -> Tensor:
            return x.reshape(shape[0] * shape[1], *x.shape[2:])[rows]

        return cls(
            pack(input_ids),
            cu_seqlens,
            pack(valid),
            {name: pack(value) for name, value in fields.items()},
            padding=Padding(rows, shape),
        )

    def to_padded(self, x: Tensor) -> Tensor:
        """Lay per-token values back out as [B, S, ...], 0 / False at padding. Differentiable.

        A batch that was not made by `from_padded` is padded on the right to its longest document.

        Args:
            x: [T, ...].

        Raises:
            BatchError: ``x`` has not T rows.
        """
        need_tensor("x", x)
        padding = self.padding or _right_padding(self.cu_seqlens)
        if x.ndim == 0 or x.shape[0] != padding.rows.shape[0]:
            raise BatchError(
                f"to_padded needs one value a token, [T={padding.rows.shape[0]}, ...], "
                f"found shape {list(x.shape)}"
            )
        batch, width = padding.shape
        flat = x.new_zeros((batch * width, *x.shape[1:]))
        return flat.index_copy(0, padding.rows.to(x.device), x).reshape(batch, width, *x.shape[1:])


def _as_bool(name: str, mask: Tensor) -> Tensor:
    """Read a mask; tokenizers and trainers write them as integers or floats as well."""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BatchError(f"{name} must hold 0 and 1 (or bool) only")
    return mask.ne(0)


def _padded_lengths(attention_mask: Tensor) -> Tensor:
    """Count each row's real tokens; refuse holes."""
    real = attention_mask.to(torch.int64)
    # a piece starts where a real token follows padding or the row's edge
    starts = (real - torch.nn.functional.pad(real, (1, 0))[:, :-1]).eq(1).sum(1)
    holes = (starts > 1).nonzero()
    if holes.numel():
        raise BatchError(
            f"attention_mask row {int(holes[0, 0])} has a hole: real tokens must be in one piece, "
            "padded on the left or right only"
        )
    return real.sum(1)


def _right_padding(cu_seqlens: Tensor) -> Padding:
    lengths = check_cu_seqlens(cu_seqlens)
    width = max(lengths, default=0)
    spans = [torch.arange(n) + d * width for d, n in enumerate(lengths)]
    rows = torch.cat(spans) if spans else torch.arange(0)
    return Padding(rows, (len(lengths), width))

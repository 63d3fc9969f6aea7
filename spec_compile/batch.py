"""Packed batches: what the user hands in, and the checked form that the rest of the package reads.

Legend: T rows of the packed row, N documents, B x S the padded form, A anchors.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batch_checks import (
    check_anchors,
    check_cu_seqlens,
    check_fields,
    check_mask,
    check_tokens,
    need_device,
    need_tensor,
)
from .errors import BatchError
from .options import refuse_unknown

HOST = torch.device("cpu")
"""Where batches are checked and dealt, whatever the default device is."""


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


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedBatch:
    """A batch, or a micro-batch of it, that has passed `check_batch`.

    Its vectors are on the host, where they are checked, dealt and planned with; `moved` takes them to the
    device. Fields never leave it.
    """

    device: torch.device
    """Where the user's tensors are."""
    tokens: Tensor
    """int64 [T], contiguous."""
    cu_seqlens: Tensor
    """int64 [N + 1]."""
    lengths: list[int]
    """Tokens of each document."""
    loss_mask: Tensor
    """bool [T], False at first tokens."""
    draft_mask: Tensor
    """bool [T], False at first tokens; the loss mask when none was given."""
    positions: Tensor
    """int64 [T], restarting at 0 in each document."""
    document: Tensor
    """int64 [T], 0..N-1."""
    fields: dict[str, Tensor]
    """Per-token tensors [T, ...]."""
    anchors: Tensor | None
    """int64 [A] rows of this packed row, or None."""
    anchor_seed: int
    rows: Tensor
    """int64 [T]: each row's index in the full batch."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Rows of the packed row, T."""
        return self.tokens.shape[0]

    @property
    def valid_tokens(self) -> int:
        """Tokens in the policy loss."""
        return int(self.loss_mask.sum())

    def moved(self) -> CheckedBatch:
        """The same with all vectors on `device`; nobody waits for them."""
        names = ["tokens", "cu_seqlens", "loss_mask", "draft_mask", "positions", "document", "rows"]
        if self.anchors is not None:
            names.append("anchors")
        moved: dict[str, Any] = {
            name: getattr(self, name).to(self.device, non_blocking=True) for name in names
        }
        return dataclasses.replace(self, **moved)


def check_batch(batch: PackedBatch, vocab_size: int) -> CheckedBatch:
    """Check everything about a batch that one rank can see, and normalise it.

    Args:
        batch: as the user made it.
        vocab_size: ids are 0..vocab_size-1.

    Raises:
        BatchError: says what was expected, what was found, and what to do.
    """
    if not isinstance(batch, PackedBatch):
        raise BatchError(f"expected a PackedBatch, found {type(batch).__name__}; build one first")
    need_tensor("tokens", batch.tokens)
    device = batch.tokens.device
    batch = _on_host(batch, device)
    tokens = check_tokens(batch.tokens, vocab_size)
    lengths = check_cu_seqlens(batch.cu_seqlens, tokens.shape[0])
    seed = batch.anchor_seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BatchError(f"anchor_seed must be an int, found {seed!r}")
    loss_mask = check_mask("loss_mask", batch.loss_mask, tokens)
    draft_mask = loss_mask
    if batch.draft_mask is not None:
        draft_mask = check_mask("draft_mask", batch.draft_mask, tokens)
    anchors = None if batch.anchors is None else check_anchors(batch.anchors, tokens)
    fields = check_fields(batch.fields, tokens)
    for name, value in fields.items():
        need_device(f"fields[{name!r}]", value, device)
    return _assemble(
        device=device,
        tokens=_savable(tokens),
        lengths=lengths,
        loss_mask=loss_mask,
        draft_mask=draft_mask,
        fields={name: _savable(value) for name, value in fields.items()},
        anchors=None if anchors is None else _savable(anchors),
        anchor_seed=seed,
        rows=torch.arange(tokens.shape[0], device=HOST),
    )


def _on_host(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its vectors read back together: the host waits once."""
    names = ("tokens", "cu_seqlens", "loss_mask", "draft_mask", "anchors")
    given = {name: getattr(batch, name) for name in names}
    for name in names[2:]:
        need_device(name, given[name], device)
    there = {
        name: x for name, x in given.items() if isinstance(x, Tensor) and x.device.type == "cuda"
    }
    if not there:
        return batch
    batch = copy.copy(batch)
    for name, x in there.items():
        here = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True)
        setattr(batch, name, here.copy_(x, non_blocking=True))
    for where in {x.device for x in there.values()}:
        torch.cuda.current_stream(where).synchronize()
    return batch


def _savable(x: Tensor) -> Tensor:
    """Copy what was made under torch.inference_mode (by a rollout): autograd refuses to save it."""
    return x.clone() if x.is_inference() else x


def take_documents(checked: CheckedBatch, docs: list[int]) -> CheckedBatch:
    """Make a micro-batch of some documents, in the given order.

    Anchors are rebased to the micro-batch's rows; unused entries (-1) are left behind.
    """
    if checked.anchors is None and docs == list(range(len(checked.lengths))):
        return checked
    starts = list(itertools.accumulate(checked.lengths, initial=0))
    spans = [torch.arange(starts[d], starts[d + 1], device=HOST) for d in docs]
    picked = torch.cat(spans) if spans else torch.arange(0, device=HOST)
    anchors = None
    if checked.anchors is not None:
        is_anchor = torch.zeros(checked.num_tokens, dtype=torch.bool, device=HOST)
        is_anchor[checked.anchors[checked.anchors >= 0]] = True
        anchors = is_anchor[picked].nonzero()[:, 0]
    there = picked.to(checked.device, non_blocking=True)
    return _assemble(
        device=checked.device,
        tokens=checked.tokens[picked],
        lengths=[checked.lengths[d] for d in docs],
        loss_mask=checked.loss_mask[picked],
        draft_mask=checked.draft_mask[picked],
        fields={name: value[there] for name, value in checked.fields.items()},
        anchors=anchors,
        anchor_seed=checked.anchor_seed,
        rows=checked.rows[picked],
    )


def digest(checked: CheckedBatch) -> str:
    """Hash all contents, dtypes and shapes: what ranks that share a batch compare."""
    hasher = hashlib.blake2b(digest_size=16)
    tensors: dict[str, Tensor | None] = {
        "tokens": checked.tokens,
        "loss_mask": checked.loss_mask,
        "draft_mask": checked.draft_mask,
        "anchors": checked.anchors,
        **{f"fields.{name}": checked.fields[name] for name in sorted(checked.fields)},
    }
    hasher.update(f"{checked.lengths} {checked.anchor_seed}".encode())
    for name, tensor in tensors.items():
        if tensor is None:
            hasher.update(f"|{name} None".encode())
            continue
        hasher.update(f"|{name!r} {tensor.dtype} {list(tensor.shape)}|".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _assemble(*, lengths: list[int], tokens: Tensor, **parts: Any) -> CheckedBatch:
    """Derive offsets, positions and document numbers; take the masks away from first tokens."""
    sizes = torch.tensor(lengths, dtype=torch.int64, device=HOST)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=HOST)
    cu_seqlens[1:] = sizes.cumsum(0)
    document = torch.arange(len(lengths), device=HOST).repeat_interleave(sizes)
    positions = torch.arange(tokens.shape[0], device=HOST) - cu_seqlens[document]
    later = positions > 0
    for name in ("loss_mask", "draft_mask"):
        parts[name] = parts[name] & later
    return CheckedBatch(
        tokens=tokens,
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        positions=positions,
        document=document,
        **parts,
    )


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

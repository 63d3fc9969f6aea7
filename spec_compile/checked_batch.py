"""A batch that has passed all checks: what the rest of the package reads.

Legend: T rows of the packed row, N documents, A anchors.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batch import PackedBatch
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

HOST = torch.device("cpu")
"""Where batches are checked and dealt, whatever the default device is."""


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

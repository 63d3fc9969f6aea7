"""Collectives built from pairwise messages, so that every world adds up in the same order."""

from __future__ import annotations

import abc
import math
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.errors import ChannelError

from .failure import FailureLatch

Message = tuple[int, Tensor]
"""Group rank of the peer, and a contiguous tensor with elements."""

COLLECTIVE = 0
"""Lane of the collectives; the caller's tag t travels on lane t + 1."""
SMALL_BYTES = 1 << 15
"""Up to here an all-reduce gathers everything: one round of messages instead of two."""
BLOCK_BYTES = 1 << 26
"""Largest piece of an all-reduce, which needs about three times its bytes as scratch."""


class PairwiseFabric(abc.ABC):
    """A `Fabric` whose group can move tensors between two ranks.

    Sums run over ranks 0, 1, 2, ... in that order, in float32 for bfloat16 and float16, so results
    are the same bits on every rank and in every world. Inputs are read without autograd.

    Args:
        name: the name under which operators look it up.
        rank: this rank's index inside the group.
        size: ranks in the group.
        device: where `recv` puts tensors.
        latch: the failure that ends every wait.
    """

    def __init__(
        self, name: str, rank: int, size: int, device: torch.device, latch: FailureLatch
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self._latch = latch
        self._broken: str | None = None
        self._own: defaultdict[int, deque[Tensor]] = defaultdict(deque)

    @abc.abstractmethod
    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and fill all, on the collectives' lane; returns when both are done."""

    @abc.abstractmethod
    def _post(self, x: Tensor, dst: int, lane: int) -> None:
        """Start sending ``x``, which the caller may drop."""

    @abc.abstractmethod
    def _take(self, out: Tensor, src: int, lane: int) -> None:
        """Wait for a posted tensor."""

    @abc.abstractmethod
    def _drain(self) -> None:
        """Wait until all posted tensors were taken."""

    def close(self) -> None:
        """Free the group; idempotent."""
        self._broken = self._broken or "it was closed"
        self._own.clear()

    def check(self) -> None:
        """Raise when this fabric can no longer be used.

        Raises:
            ChannelError: the fabric was closed or broke. A peer's failure comes as its own class.
        """
        self._latch.check()
        if self._broken is not None:
            raise ChannelError(
                f"fabric {self.name!r} on its rank {self.rank} of {self.size} cannot be used any "
                f"more: {self._broken}; build a new model to go on"
            )

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], the same on every rank; equal shapes on all ranks."""
        x = x.detach().contiguous()
        out = x.new_empty((self.size, *x.shape))
        out[self.rank].copy_(x)
        others = [r for r in range(self.size) if r != self.rank]
        self._move([(r, x) for r in others], [(r, out[r]) for r in others])
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]: the sum over ranks of their ``x[rank]``."""
        if x.shape[:1] != (self.size,):
            raise ChannelError(
                f"fabric {self.name!r}: reduce_scatter expects a first dimension of {self.size}, "
                f"found shape {tuple(x.shape)}"
            )
        x = x.detach().contiguous()
        parts = [x[r] if r == self.rank else torch.empty_like(x[r]) for r in range(self.size)]
        others = [r for r in range(self.size) if r != self.rank]
        self._move([(r, x[r]) for r in others], [(r, parts[r]) for r in others])
        return ordered_sum(parts)

    def all_reduce_(self, x: Tensor) -> None:
        """Sum over ranks, in place; bitwise the same on every rank."""
        self.check()
        if self.size == 1 or x.numel() == 0:
            return
        x = x.detach()
        flat = x.reshape(-1)  # a copy when x is not contiguous
        for block in flat.split(max(self.size, BLOCK_BYTES // x.element_size())):
            self._reduce_block(block)
        if not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def _reduce_block(self, block: Tensor) -> None:
        if block.numel() * block.element_size() <= SMALL_BYTES:
            block.copy_(ordered_sum(list(self.all_gather(block))))
            return
        part = math.ceil(block.numel() / self.size)
        padded = torch.nn.functional.pad(block, (0, self.size * part - block.numel()))
        total = self.all_gather(self.reduce_scatter(padded.view(self.size, part)))
        block.copy_(total.view(-1)[: block.numel()])

    def shift(self, tensors: Sequence[Tensor], offset: int = 1) -> list[Tensor]:
        """Send to ``rank + offset``, receive from ``rank - offset`` (mod size)."""
        values = [x.detach().contiguous() for x in tensors]
        if offset % self.size == 0:
            self.check()
            return [x.clone() for x in values]
        out = [torch.empty_like(x) for x in values]
        dst, src = (self.rank + offset) % self.size, (self.rank - offset) % self.size
        self._move([(dst, x) for x in values], [(src, x) for x in out])
        return out

    def exchange(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor]:
        """All to all: ``send[r]`` goes to rank r; returns what each rank sent here."""
        if len(send) != self.size or len(shapes) != self.size:
            raise ChannelError(
                f"fabric {self.name!r}: exchange expects {self.size} tensors and shapes, "
                f"found {len(send)} and {len(shapes)}"
            )
        values = [x.detach().contiguous() for x in send]
        out = [x.new_empty(tuple(s), dtype=dtype) for x, s in zip(values, shapes, strict=True)]
        others = [r for r in range(self.size) if r != self.rank]
        self._move([(r, values[r]) for r in others], [(r, out[r]) for r in others])
        out[self.rank].copy_(values[self.rank])
        return out

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Start sending to group rank ``dst`` and return; the fabric keeps ``x`` until `flush`."""
        self.check()
        x = x.detach().contiguous()
        if dst == self.rank:
            self._own[tag].append(x)
        elif x.numel():
            self._post(x, dst, tag + 1)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0) -> Tensor:
        """Wait for the tensor that group rank ``src`` sent with ``tag``."""
        self.check()
        out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if src == self.rank:
            if not self._own[tag]:
                raise ChannelError(
                    f"fabric {self.name!r}: rank {self.rank} waits for a tensor of its own with "
                    f"tag {tag} that it never sent; send before recv"
                )
            out.copy_(self._own[tag].popleft())
        elif out.numel():
            self._take(out, src, tag + 1)
        return out

    def flush(self) -> None:
        """Wait until everything sent has been taken."""
        self.check()
        self._drain()

    def _move(self, sends: list[Message], receives: list[Message]) -> None:
        self.check()
        sends = [(peer, x) for peer, x in sends if x.numel()]
        receives = [(peer, x) for peer, x in receives if x.numel()]
        if sends or receives:
            self._swap(sends, receives)


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add ``parts`` first to last into a new tensor; half precision adds up in float32."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    return total.to(dtype)

"""A group of which one rank runs: what the others would send comes out of memory, at the cost of a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.runtime.collectives import ordered_sum


class ReplayFabric:
    """Stands for the runtime's fabric where the ranks of a group run one after the other.

    Received tensors are copies of random values, so their memory and one write of it are real; the
    transfer itself is not, and `sent_bytes` counts what it would have moved.

    Args:
        name: the name under which operators look it up.
        rank: this rank's index inside the group.
        size: ranks in the group.
        device: where received tensors are put.
    """

    def __init__(self, name: str, rank: int, size: int, device: torch.device) -> None:
        self.name, self.rank, self.size, self.device = name, rank, size, device
        self.sent_bytes = 0
        self._pools: dict[torch.dtype, Tensor] = {}

    @property
    def pool_bytes(self) -> int:
        """Memory of the random values themselves, which no rank of a real group holds."""
        return sum(pool.numel() * pool.itemsize for pool in self._pools.values())

    def fill(self, value: float, like: Tensor) -> None:
        """Let every received tensor of ``like``'s dtype, and no larger than it, hold ``value``."""
        self._pools[like.dtype] = torch.full_like(like, value).reshape(-1)

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Count it."""
        self.sent_bytes += _bytes(x)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0) -> Tensor:
        """Return a tensor of that shape."""
        return self._received(torch.empty(tuple(shape), dtype=dtype, device=self.device))

    def flush(self) -> None:
        """Nothing is under way."""

    def shift(self, tensors: Sequence[Tensor], offset: int = 1) -> list[Tensor]:
        """Count, and return what the neighbour would send."""
        self.sent_bytes += sum(map(_bytes, tensors))
        return [self._received(torch.empty_like(x)) for x in tensors]

    def exchange(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor]:
        """Count what leaves this rank, and return what each rank would send."""
        self.sent_bytes += sum(_bytes(x) for r, x in enumerate(send) if r != self.rank)
        parts = [self.recv(shape, dtype, r) for r, shape in enumerate(shapes)]
        parts[self.rank] = send[self.rank].clone()
        return parts

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]: what each rank would send in place of what it is sent."""
        self.sent_bytes += _bytes(x) * (self.size - 1) // self.size
        out = torch.empty_like(x)
        for r in range(self.size):
            out[r].copy_(x[r]) if r == self.rank else self._received(out[r])
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...]."""
        self.sent_bytes += _bytes(x) * (self.size - 1)
        out = x.new_empty((self.size, *x.shape))
        for r in range(self.size):
            out[r].copy_(x) if r == self.rank else self._received(out[r])
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]."""
        self.sent_bytes += _bytes(x) * (self.size - 1) // self.size
        parts = [x[self.rank].detach()]
        parts += [self._received(torch.empty_like(parts[0])) for _ in range(self.size - 1)]
        return ordered_sum(parts)

    def all_reduce_(self, x: Tensor) -> None:
        """Count a reduce-scatter and an all-gather; the values stay."""
        self.sent_bytes += 2 * _bytes(x) * (self.size - 1) // self.size

    def _received(self, out: Tensor) -> Tensor:
        number = math.prod(out.shape)
        pool = self._pools.get(out.dtype)
        if pool is None or pool.numel() < number:
            pool = torch.randn(number, device=self.device, dtype=torch.float32).to(out.dtype)
            self._pools[out.dtype] = pool
        return out.copy_(pool[:number].view(out.shape))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.itemsize

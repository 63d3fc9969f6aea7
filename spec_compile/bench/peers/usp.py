"""The published sequence-parallel attention of EAGLE-3: Ulysses x contiguous ring in every pass.

Every pass exchanges q, k and v from rows to heads, rotates the first pass' keys and values round a ring of
contiguous chunks (unbalanced: chunk r has r + 1 tiles), joins each later pass' keys as a diagonal in the
accumulator's precision, and saves a stack of all keys and values so far beside an accumulator. Written
from a reading of the sources named below, to be measured against; nothing of it runs in a step.

Where the original could be read in two ways, the cheaper one is taken: no unpadding around the kernel,
no position rotation, and the same merge with and without a ring.

Source: SpecForge's LlamaUSPFlashAttention and its cached ring merge, ring-flash-attention's contiguous
ring, long-context-attention's all-to-all. NeMo Automodel's draft ring is the same procedure with keys and
values repeated to the query heads before they are cached, and no Ulysses part.

Legend: n own rows, U ranks of Ulysses, R ranks of the ring, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_compile.errors import ConfigError
from spec_compile.ir.dtypes import accumulator
from spec_compile.runtime.attention.interface import Backend
from spec_compile.runtime.fabric import Fabric

from .ring_merge import join


class Group(Protocol):
    """What the procedure needs of a group of ranks."""

    rank: int
    size: int

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Start sending."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0) -> Tensor:
        """Wait for a tensor."""

    def flush(self) -> None:
        """Wait until everything was taken."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]."""


class FabricGroup:
    """A real group as a `Group`."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank, self.size = fabric.rank, fabric.size
        self.recv, self.flush = fabric.recv, fabric.flush
        self._fabric = fabric
        self.sent_bytes = 0

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Send to a rank of the group, and count it."""
        self.sent_bytes += x.nbytes
        self._fabric.send(x, dst, tag)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]."""
        self.sent_bytes += x.nbytes * (self.size - 1) // self.size
        return torch.stack(self._fabric.exchange(list(x), [x.shape[1:]] * self.size, x.dtype))


@dataclass(frozen=True)
class Usp:
    """One rank of the procedure: rank ``ring.rank * U + ulysses.rank`` owns the row's chunk of that number."""

    ulysses: Group
    ring: Group
    backend: Backend
    """Computes the tiles."""
    scale: float

    def check(self, heads: int, key_heads: int) -> None:
        """Refuse head counts that the exchange cannot deal out."""
        if heads % self.ulysses.size or key_heads % self.ulysses.size:
            raise ConfigError(
                f"the Ulysses part deals whole heads to {self.ulysses.size} ranks, found {heads} query and "
                f"{key_heads} key heads; use a smaller Ulysses part"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[list[Tensor], list[Tensor]]
    ) -> Tensor:
        """Run one pass and append its keys and values to the cache.

        Args:
            q: [n, H, D].
            k: [n, G, D].
            v: [n, G, D].
            cache: keys and values of the passes so far, in heads' layout; empty lists in the first pass.

        Returns:
            [n, H, D].
        """
        q, k, v = (_to_heads(x, self.ulysses) for x in (q, k, v))
        keys, values = cache
        keys.append(k)
        values.append(v)
        out: Tensor = _CachedRing.apply(q, torch.stack(keys), torch.stack(values), self)  # type: ignore[no-untyped-call]
        return _to_rows(out, self.ulysses)


class _CachedRing(torch.autograd.Function):
    """Ring over block 0 and diagonals of the others, one softmax."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, usp: Usp) -> Tensor:
        out, lse = _ring_forward(usp, q, keys[0].contiguous(), values[0].contiguous())
        grouped = _by_key_head(q, keys.shape[2]).to(lse.dtype)
        out, lse = _by_key_head(out, keys.shape[2]), lse.reshape(grouped.shape[:-1])
        for key, value in zip(keys[1:], values[1:], strict=True):
            score = (grouped * key[:, :, None].to(lse.dtype)).sum(-1) * usp.scale
            both = torch.logaddexp(lse, score)
            out = out * torch.exp(lse - both)[..., None]
            out = out + value[:, :, None].to(lse.dtype) * torch.exp(score - both)[..., None]
            lse = both
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.usp = usp
        return out.to(q.dtype).view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, keys, values, out, lse = ctx.saved_tensors
        usp: Usp = ctx.usp
        grad, work = grads[0], lse.dtype
        grad_wide = _by_key_head(grad, keys.shape[2]).to(work)
        grouped = _by_key_head(q, keys.shape[2]).to(work)
        dkeys, dvalues = (torch.zeros_like(x, dtype=work) for x in (keys, values))
        dq_ring, dk_ring, dv_ring = _ring_backward(
            usp, grad.contiguous(), q, keys[0].contiguous(), values[0].contiguous(),
            out.to(q.dtype).view_as(q), lse.view(q.shape[:2]).contiguous(),
        )  # fmt: skip
        dq = _by_key_head(dq_ring.to(work), keys.shape[2])
        dkeys[0], dvalues[0] = dk_ring, dv_ring
        for i in range(1, len(keys)):
            key, value = keys[i, :, :, None].to(work), values[i, :, :, None].to(work)
            weight = torch.exp((grouped * key).sum(-1) * usp.scale - lse)
            d_score = weight * (grad_wide * (value - out)).sum(-1)
            dq += d_score[..., None] * usp.scale * key
            dkeys[i] += (d_score[..., None] * usp.scale * grouped).sum(2)
            dvalues[i] += (grad_wide * weight[..., None]).sum(2)
        return dq.to(q.dtype).view_as(q), dkeys.to(keys.dtype), dvalues.to(values.dtype), None


def _ring_forward(usp: Usp, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    ring = usp.ring
    out = lse = None
    for step in range(ring.size):
        more = step + 1 < ring.size
        if more:
            _post(ring, (k, v), step)
        if step <= ring.rank:
            part = usp.backend.forward(q, k, v, mask=None, causal=step == 0, scale=usp.scale)
            if out is None or lse is None:
                out, lse = part[0].to(accumulator(q.dtype)), part[1]
            else:
                out, lse = join(out, lse, *part)
        if more:
            k, v = _take(ring, (k, v), step)
    ring.flush()
    assert out is not None, "every rank has a tile of its own"
    assert lse is not None, "every rank has a tile of its own"
    return out.to(q.dtype), lse


def _ring_backward(
    usp: Usp, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    ring, work = usp.ring, lse.dtype
    dq = torch.empty(0)
    grads: tuple[Tensor, ...] = ()
    for step in range(ring.size):
        more = step + 1 < ring.size
        if more:
            _post(ring, (k, v), step)
        if step <= ring.rank:
            parts = usp.backend.backward(
                grad, q, k, v, out, lse, mask=None, causal=step == 0, scale=usp.scale
            )  # fmt: skip
            if step == 0:
                dq, *first = (x.to(work) for x in parts)
                grads = tuple(first)
            else:
                dq += parts[0]
                grads = _take(ring, grads, ring.size + step - 1)
                grads = (parts[1] + grads[0], parts[2] + grads[1])
        else:
            grads = _take(ring, grads, ring.size + step - 1)
        if more:
            k, v = _take(ring, (k, v), step)
        _post(ring, grads, ring.size + step)
    grads = _take(ring, grads, 2 * ring.size - 1)
    ring.flush()
    return dq.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype)


def _post(ring: Group, tensors: tuple[Tensor, ...], hop: int) -> None:
    if ring.size > 1:
        for i, x in enumerate(tensors):
            ring.send(x, (ring.rank + 1) % ring.size, tag=2 * hop + i)


def _take(ring: Group, like: tuple[Tensor, ...], hop: int) -> tuple[Tensor, ...]:
    if ring.size == 1:
        return like
    src = (ring.rank - 1) % ring.size
    return tuple(ring.recv(x.shape, x.dtype, src, tag=2 * hop + i) for i, x in enumerate(like))


class _ToHeads(torch.autograd.Function):
    """[n, H, D] -> [U * n, H / U, D]: all rows of the group's ranks, an equal share of the heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scatter_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather_heads(grads[0], ctx.group), None


class _ToRows(torch.autograd.Function):
    """[U * n, H / U, D] -> [n, H, D]: the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter_heads(grads[0], ctx.group), None


def _to_heads(x: Tensor, group: Group) -> Tensor:
    out: Tensor = _ToHeads.apply(x, group) if group.size > 1 else x  # type: ignore[no-untyped-call]
    return out


def _to_rows(x: Tensor, group: Group) -> Tensor:
    out: Tensor = _ToRows.apply(x, group) if group.size > 1 else x  # type: ignore[no-untyped-call]
    return out


def _scatter_heads(x: Tensor, group: Group) -> Tensor:
    n, heads, dim = x.shape
    dealt = x.reshape(n, group.size, heads // group.size, dim).transpose(0, 1).contiguous()
    return group.all_to_all(dealt).flatten(0, 1)


def _gather_heads(x: Tensor, group: Group) -> Tensor:
    dealt = x.contiguous().view(group.size, -1, *x.shape[1:])
    return group.all_to_all(dealt).transpose(0, 1).flatten(1, 2)


def _by_key_head(x: Tensor, key_heads: int) -> Tensor:
    return x.reshape(x.shape[0], key_heads, -1, x.shape[2])

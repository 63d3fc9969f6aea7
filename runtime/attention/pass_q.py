"""Moving queries: rows visit the ranks whose keys they see, and bring partial results home.

Keys, values and their gradients never travel. A visit carries only rows that see a key there, which is
known on both sides beforehand. At distance d, rank r sends to r + d and is visited by r - d.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spec_compile.ir.dtypes import accumulator

from ..fabric import Fabric
from .interface import Backend
from .merges import merge
from .tiles import Merged, Partial, TileGrads, attend, attend_backward
from .visits import Visits

QUERY, GRAD, SUMS, OUT, LSE, DQ = range(6)
"""Tags: of what goes, and of what comes back."""


def visiting(
    fabric: Fabric, visits: Visits, backend: Backend, joiner: str, q: Tensor, k: Tensor, v: Tensor,
    scale: float,
) -> Iterator[list[Partial]]:  # fmt: skip
    """Yield partials of this rank's rows: over its own keys first, then those of ever more distant ranks.

    The next rows are under way while others are attended to.

    Args:
        fabric: the group of ranks.
        visits: who visits whom with what.
        backend: computes the blocks.
        joiner: a result of `merge_backend`.
        q: [R, Hq, D], own rows.
        k: [n, Hkv, D], own keys.
        v: [n, Hkv, Dv].
        scale: factor on the scores.
    """
    own = fabric.rank
    _go(fabric, visits, 1, [(QUERY, q)])
    yield attend(visits(own, own).plan, backend, q, k, v, scale)
    for distance in range(1, fabric.size):
        _go(fabric, visits, distance + 1, [(QUERY, q)])
        guest = (own - distance) % fabric.size
        plan = visits(guest, own).plan
        if plan.num_rows:
            theirs = fabric.recv((plan.num_rows, *q.shape[1:]), q.dtype, guest, QUERY)
            parts = attend(plan, backend, theirs, k, v, scale)
            out, lse, _ = merge(parts, q=theirs, scale=scale, out_dtype=q.dtype, backend=joiner)
            fabric.send(out, guest, OUT)
            fabric.send(lse, guest, LSE)
        if distance > 1:
            yield _come_home(fabric, visits, distance - 1, q, v.shape[2])
    if fabric.size > 1:
        yield _come_home(fabric, visits, fabric.size - 1, q, v.shape[2])
        fabric.flush()


def visiting_backward_(
    fabric: Fabric, visits: Visits, backend: Backend, merged: Merged, q: Tensor, k: Tensor,
    v: Tensor, scale: float, grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Add to ``grads``: dq [R, Hq, D] of own rows, dk [n, Hkv, D] and dv [n, Hkv, Dv] of own keys.

    A row travels with its gradient, merged lse and delta; its share of dq comes back in fp32 (fp64 for fp64).
    """
    own, (dq, dk, dv) = fabric.rank, grads
    both = torch.stack([merged.lse, merged.delta], -1)
    luggage = [(QUERY, q), (GRAD, merged.grad_out), (SUMS, both)]
    _go(fabric, visits, 1, luggage)
    plan = visits(own, own).plan
    sums = TileGrads.onto(plan, *grads)
    attend_backward(plan, backend, merged, q, k, v, scale, sums)
    sums.settle()
    for distance in range(1, fabric.size):
        _go(fabric, visits, distance + 1, luggage)
        guest = (own - distance) % fabric.size
        plan = visits(guest, own).plan
        if plan.num_rows:
            theirs, grad_out, both = (
                fabric.recv((plan.num_rows, *x.shape[1:]), x.dtype, guest, tag)
                for tag, x in luggage
            )
            visitor = Merged.of_sums(grad_out, *both.unbind(-1))
            d_theirs = torch.zeros_like(theirs, dtype=dq.dtype)
            totals = TileGrads.onto(plan, d_theirs, dk, dv)
            attend_backward(plan, backend, visitor, theirs, k, v, scale, totals)
            totals.settle()
            fabric.send(d_theirs, guest, DQ)
        if distance > 1:
            _bring_gradients_(fabric, visits, distance - 1, dq)
    if fabric.size > 1:
        _bring_gradients_(fabric, visits, fabric.size - 1, dq)
        fabric.flush()


def _go(fabric: Fabric, visits: Visits, distance: int, luggage: list[tuple[int, Tensor]]) -> None:
    if distance >= fabric.size:
        return
    host = (fabric.rank + distance) % fabric.size
    visit = visits(fabric.rank, host)
    if visit.plan.num_rows:
        for tag, x in luggage:
            fabric.send(visit.pick(x), host, tag)


def _come_home(
    fabric: Fabric, visits: Visits, distance: int, q: Tensor, value_dim: int
) -> list[Partial]:
    host = (fabric.rank + distance) % fabric.size
    visit = visits(fabric.rank, host)
    rows, heads, work = visit.plan.num_rows, q.shape[1], accumulator(q.dtype)
    if not rows:
        return []
    out = fabric.recv((rows, heads, value_dim), q.dtype, host, OUT)
    lse = fabric.recv((rows, heads), work, host, LSE)
    if visit.rows is None:
        return [Partial(out, lse, all_seen=True)]
    whole = q.new_empty((q.shape[0], heads, value_dim))
    whole_lse = q.new_full((q.shape[0], heads), -torch.inf, dtype=work)
    whole.index_copy_(0, visit.rows, out)
    return [Partial(whole, whole_lse.index_copy_(0, visit.rows, lse))]


def _bring_gradients_(fabric: Fabric, visits: Visits, distance: int, dq: Tensor) -> None:
    host = (fabric.rank + distance) % fabric.size
    visit = visits(fabric.rank, host)
    if not visit.plan.num_rows:
        return
    part = fabric.recv((visit.plan.num_rows, *dq.shape[1:]), dq.dtype, host, DQ)
    if visit.rows is None:
        dq += part
    else:
        # every row comes once: no atomics, two runs give the same bits
        dq.index_copy_(0, visit.rows, dq.index_select(0, visit.rows) + part)

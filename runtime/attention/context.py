"""The lowered operator `spec_compile::context_attention`: branch attention over sharded rows.

One autograd node holds the whole softmax: tiles of main keys (all here, or passing on a ring), branch
keys that never travel, and sinks. Each part's backward is given the merged out and lse, so that no
gradient ever flows through a merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ConfigError, InvariantError
from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.operator import operator

from ..context import RunContext, current
from ..fabric import Fabric
from ..gathered import SharedSum, shared_sum
from .backends import BACKENDS, backend_for
from .interface import Backend
from .merges import branches_backward, merge, merge_backend
from .parts import Sum, zeros
from .pass_q import visiting, visiting_backward_
from .ring import passing, passing_with_grads
from .task import Branch, Task
from .tiles import Merged, Partial, TileGrads, attend, attend_backward

HELD_PARTS = 4
"""Partial results of a ring that are held before they are merged: a merge reads and writes the sum."""
FEW_KEYS = 1 / 8
"""Up to this share of the keys in one reader's blocks, their gradients wait for those of other readers, until
they are half of the keys: a sum in a half type is rounded less often. More would cost memory."""


@operator("context_attention")
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: list[Tensor],
    branch_v: list[Tensor],
    k_group: list[Tensor],
    q_group: list[Tensor],
    q_limit: Tensor,
    q_document: Tensor,
    k_document: Tensor,
    slots: Tensor,
    live_rows: int,
    sinks: Tensor | None,
    scale: float,
    window: int,
    kinds: str,
    strategy: str,
    merge: str,
    fabric: str,
) -> tuple[Tensor, Tensor]:
    """Attend to main keys and branches with one softmax; `ir.reference.branch_attention`, sharded.

    Args:
        q: [R, Hq, D], this rank's query rows.
        k: [cp * n, Hkv, D] by packed row for "local", else this rank's [n, Hkv, D].
        v: like k, head dim Dv.
        branch_k: keys of each branch, [S_b, Hkv, D]; [R, Hkv, D] for a diagonal one.
        branch_v: values of each branch.
        k_group: int64 [S_b] a branch; not read for diagonal ones.
        q_group: int64 [R] a branch; not read for diagonal ones.
        q_limit: int64 [R], in packed rows; with a choice of "pass_q" of all ranks' rows, [cp * R], by rank.
        q_document: int64, like q_limit.
        k_document: int64 [cp * n], full frame: by packed row.
        slots: int64 [cp * n], the packed row at each slot; rank r owns slots r * n to (r + 1) * n.
        live_rows: T; packed rows from here on are dead, and no query sees their keys.
        sinks: [Hq], one more logit a head.
        scale: factor on the scores.
        window: visible main keys below the limit; -1 for all.
        kinds: a letter a branch: "d" diagonal (key j is seen by row j alone), "r" by groups, one key a packed
            row of the whole frame, "g" by groups, keys that are no rows.
        strategy: "local"; "ring", where keys and values pass by; "pass_q", where query rows visit them; or
            "ring or pass_q", whichever sends fewer bytes.
        merge: "auto", "aten" or "triton".
        fabric: name of the group of ranks.

    Returns:
        out [R, Hq, Dv] in q's dtype, 0 where a row sees no key, and the merged lse [R, Hq] in fp32
        (fp64 for fp64), -inf where there is neither key nor sink. No gradient flows through lse.
    """
    task = Task(
        q_document, q_limit, k_document, slots, live_rows, k_group, q_group,
        scale, window, kinds, strategy, merge, fabric,
    )  # fmt: skip
    branches = list(zip(branch_k, branch_v, strict=True))
    merged = _forward(task, current(), q, k, v, branches, sinks)
    return merged.out, merged.lse


@context_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=accumulator(q.dtype))


def _forward(
    task: Task, run: RunContext, q: Tensor, k: Tensor, v: Tensor, branches: list[Branch],
    sinks: Tensor | None,
) -> Partial:  # fmt: skip
    task = task.settled(run.fabrics.get(task.fabric), q, k, v)
    backend = _backend(run, q, v)
    joiner = merge_backend(q.device, task.merge)
    work = accumulator(q.dtype)
    parts: list[Partial] = []
    for found in _main_parts(task, run, backend, joiner, q, k, v):
        parts += found
        if len(parts) >= HELD_PARTS:
            # one running sum, in the accumulator's precision, however many ranks there are
            parts = [merge(parts, q=q, scale=task.scale, out_dtype=work, backend=joiner)]
    in_blocks = task.in_blocks(branches)
    for i, (key, value) in enumerate(branches):
        if i not in in_blocks:
            parts += attend(task.branch_plan(backend.cut, i), backend, q, key, value, task.scale)
    if not parts:
        shape = (q.shape[0], q.shape[1], v.shape[2])
        nothing = q.new_full(shape[:2], -torch.inf, dtype=work)
        parts = [Partial(q.new_zeros(shape), nothing)]
    return merge(
        parts, q=q, scale=task.scale, out_dtype=q.dtype, backend=joiner,
        branches=list(in_blocks.values()), sinks=sinks,
    )  # fmt: skip


def _main_parts(
    task: Task, run: RunContext, backend: Backend, joiner: str, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[list[Partial]]:
    """Partials over main keys, a list for each rank's."""
    if task.strategy == "local":
        yield attend(task.main_plan(backend.cut), backend, q, k, v, task.scale)
        return
    fabric = _fabric(task, run)
    if task.strategy == "pass_q":
        visits = task.visits(backend.cut, fabric.size)
        yield from visiting(fabric, visits, backend, joiner, q, k, v, task.scale)
        return
    for owner, held in passing(fabric, [k, v]):
        plan = task.main_plan(backend.cut, owner, fabric.size)
        yield attend(plan, backend, q, held[0], held[1], task.scale)


@dataclass
class _Grads:
    q: Tensor
    k: Tensor | None
    """None where the sum over all readers has it."""
    v: Tensor | None
    branches: list[Branch]
    sinks: Tensor | None


_Readers = tuple[SharedSum | None, SharedSum | None]
"""Sums of gradients over all readers of gathered keys and values; None for a gradient of one's own."""


def _backward(
    task: Task, run: RunContext, merged: Merged, q: Tensor, k: Tensor, v: Tensor,
    branches: list[Branch], sinks: Tensor | None, readers: _Readers,
) -> _Grads:  # fmt: skip
    task = task.settled(run.fabrics.get(task.fabric), q, k, v)
    backend = _backend(run, q, v)
    dk: Tensor | None
    dv: Tensor | None
    dq = Sum(q, dtype=accumulator(q.dtype))
    if task.strategy == "local":
        dk, dv = _local_backward(task, backend, merged, dq, q, k, v, readers)
    else:
        dk, dv = _exchanged_backward(task, run, backend, merged, dq, q, k, v)
    branch_grads = _branches_backward(task, backend, merged, dq, q, branches)
    return _Grads(dq.result(), dk, dv, branch_grads, _sinks_backward(merged, sinks))


def _local_backward(
    task: Task, backend: Backend, merged: Merged, dq: Sum, q: Tensor, k: Tensor, v: Tensor,
    readers: _Readers,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return (dk, dv) of main keys that are all here, or None each where others read them too."""
    plan = task.main_plan(backend.cut)
    grads = TileGrads.of(plan, dq, k, v)
    of_k, of_v = readers
    if plan.order is None and of_k is not None and of_v is not None:
        grads = TileGrads(dq, of_k.begun(k), of_v.begun(v))
        attend_backward(plan, backend, merged, q, k, v, task.scale, grads)
        few = plan.num_block_keys <= FEW_KEYS * len(k)
        grads.settle(keep=len(k) // 2 if few else 0)
        return None, None
    attend_backward(plan, backend, merged, q, k, v, task.scale, grads)
    return grads.k.result(), grads.v.result()


def _exchanged_backward(
    task: Task, run: RunContext, backend: Backend, merged: Merged, dq: Sum, q: Tensor, k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dk, dv) of main keys that pass by, or that query rows visit."""
    fabric, work = _fabric(task, run), accumulator(q.dtype)
    if task.strategy == "pass_q":
        visits = task.visits(backend.cut, fabric.size)
        totals = (zeros(q, work), zeros(k, work), zeros(v, work))
        visiting_backward_(fabric, visits, backend, merged, q, k, v, task.scale, totals)
        dq.add(0, totals[0])
        return totals[1].to(k.dtype), totals[2].to(v.dtype)

    def visit(owner: int, held: list[Tensor]) -> list[Sum]:
        plan = task.main_plan(backend.cut, owner, fabric.size)
        grads = TileGrads.of(plan, dq, held[0], held[1], dtype=work)
        attend_backward(plan, backend, merged, q, held[0], held[1], task.scale, grads)
        return [grads.k, grads.v]

    dk, dv = passing_with_grads(fabric, [k, v], work, visit)
    return dk.to(k.dtype), dv.to(v.dtype)


def _branches_backward(
    task: Task, backend: Backend, merged: Merged, dq: Sum, q: Tensor, branches: list[Branch]
) -> list[Branch]:
    """Add to dq, and return (dk, dv) of every branch."""
    in_blocks = task.in_blocks(branches)
    joiner = merge_backend(q.device, task.merge)
    dqs, found = branches_backward(merged, q, list(in_blocks.values()), task.scale, joiner)
    for part in dqs:
        dq.add(0, part)
    grads = dict(zip(in_blocks, found, strict=True))
    for i, (key, value) in enumerate(branches):
        if i not in in_blocks:
            plan = task.branch_plan(backend.cut, i)
            tile = TileGrads.of(plan, dq, key, value)
            attend_backward(plan, backend, merged, q, key, value, task.scale, tile)
            grads[i] = (tile.k.result(), tile.v.result())
    return [grads[i] for i in range(len(branches))]


def _sinks_backward(merged: Merged, sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    weights = torch.exp(sinks.to(merged.lse) - merged.lse)
    return -(weights * merged.delta).sum(0).to(sinks.dtype)


def _backend(run: RunContext, q: Tensor, v: Tensor) -> Backend:
    requested = run.options.get("attention", "auto")
    return BACKENDS[backend_for(q.device, q.dtype, q.shape[2], v.shape[2], requested)]


def _fabric(task: Task, run: RunContext) -> Fabric:
    if task.strategy not in ("ring", "pass_q"):
        raise ConfigError(f"strategy must be 'local', 'ring' or 'pass_q', found {task.strategy!r}")
    return run.fabrics[task.fabric]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (q, k, v, branch_k, branch_v, k_group, q_group, q_limit, q_document, k_document, slots,
     ctx.live_rows, sinks, *options) = inputs  # fmt: skip
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.num_branches = len(branch_k)
    ctx.options = options
    ctx.has_sinks = sinks is not None
    ctx.readers = (shared_sum(k), shared_sum(v))
    ctx.save_for_backward(
        q, k, v, out, lse, q_limit, q_document, k_document, slots,
        *branch_k, *branch_v, *k_group, *q_group, *([] if sinks is None else [sinks]),
    )  # fmt: skip
    try:
        ctx.run = current()
    except InvariantError:
        # traced with fake values outside a bound model: such a graph is never run backward
        ctx.run = None


def _backward_node(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, q_limit, q_document, k_document, slots, *rest = ctx.saved_tensors
    sinks = rest.pop() if ctx.has_sinks else None
    n = ctx.num_branches
    branch_k, branch_v, k_group, q_group = (rest[i * n : (i + 1) * n] for i in range(4))
    task = Task(
        q_document, q_limit, k_document, slots, ctx.live_rows, k_group, q_group, *ctx.options
    )  # fmt: skip
    run = ctx.run if ctx.run is not None else current()
    merged = Merged.of(grad_out, out, lse)
    branches = list(zip(branch_k, branch_v, strict=True))
    grads = _backward(task, run, merged, q, k, v, branches, sinks, ctx.readers)
    d_branch_k, d_branch_v = ([pair[i] for pair in grads.branches] for i in range(2))
    none = [None] * n
    return (
        grads.q, grads.k, grads.v, d_branch_k, d_branch_v, none, none,
        None, None, None, None, None, grads.sinks, *([None] * len(ctx.options)),
    )  # fmt: skip


context_attention.register_autograd(_backward_node, setup_context=_setup_context)

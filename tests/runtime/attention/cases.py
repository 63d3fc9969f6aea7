"""Packed inputs for branch attention on several ranks, and the same attention row by row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.plan import Plan
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.processes import join, open_world
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_processes, run_threads

PACKED = (7, 21, 1, 35, 0, 3)


@dataclass
class Case:
    """One packed row in packed order; float64 leaves, also for the lower precisions."""

    slots: Tensor
    document: Tensor
    limit: Tensor
    q_document: Tensor
    leaves: dict[str, Tensor]
    """q, k, v, and bk0, bv0, ... for branches; sinks."""
    kinds: str
    k_group: Tensor
    q_group: Tensor
    row_group: Tensor
    """[cp * n], of keys and queries of a branch over rows."""
    live_rows: int
    scale: float = 0.3
    window: int = -1
    cotangent: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def branches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.leaves[f"bk{i}"], self.leaves[f"bv{i}"]) for i in range(len(self.kinds))]


def random_slots(num_tokens: int, cp: int, seed: int) -> Tensor:
    """Any partition of the rows and of some dead ones; ascending inside a rank, as layouts are."""
    n = max(2, -(-num_tokens // cp))
    order = np.random.default_rng(seed).permutation(cp * n).reshape(cp, n)
    if cp == 1:
        order = np.arange(n).reshape(1, n)
    return torch.from_numpy(np.sort(order, 1).reshape(-1))


def make_case(
    lengths: tuple[int, ...] = PACKED, cp: int = 2, *, slots: Tensor | None = None,
    heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16), kinds: str = "",
    window: int = -1, sinks: bool = False, scale: float = 0.3, blind: bool = False, wide: bool = False,
    seed: int = 0,
) -> Case:  # fmt: skip
    """A case with random values; ``blind`` makes some rows see no main key, ``wide`` all of the row."""
    draw = torch.Generator().manual_seed(seed)
    slots = random_slots(sum(lengths), cp, seed) if slots is None else slots
    total = len(slots)
    document = torch.full((total,), len(lengths))
    document[: sum(lengths)] = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    limit, q_document = torch.arange(total) + 1, document.clone()
    if blind:
        limit[::5] = 0
        q_document[3::7] = -1

    if wide:
        document, q_document = torch.zeros_like(document), torch.zeros_like(document)
        limit[1::2] = 1000

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    num_keys = 11
    leaves = {
        "q": leaf(total, heads[0], dims[0]), "k": leaf(total, heads[1], dims[0]),
        "v": leaf(total, heads[1], dims[1]),
    }  # fmt: skip
    for i, kind in enumerate(kinds):
        length = num_keys if kind == "g" else total
        leaves[f"bk{i}"] = leaf(length, heads[1], dims[0])
        leaves[f"bv{i}"] = leaf(length, heads[1], dims[1])
    if sinks:
        leaves["sinks"] = leaf(heads[0])
    return Case(
        slots, document, limit, q_document, leaves, kinds,
        torch.randint(0, 4, (num_keys,), generator=draw),
        torch.randint(-1, 5, (total,), generator=draw),
        torch.randint(0, 3, (total,), generator=draw), sum(lengths), scale, window,
        torch.randn(total, heads[0], dims[1], generator=draw, dtype=torch.float64),
    )  # fmt: skip


def block_case(
    rows: int, keys: int, num_blocks: int, *, heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16), sinks: bool = False,
) -> Case:  # fmt: skip
    """One rank, one branch in blocks: run i of the rows sees run i of the keys."""
    lengths = (rows * num_blocks - 3, 3)
    case = make_case(lengths, 1, heads=heads, dims=dims, kinds="g", sinks=sinks, blind=True)
    names = 3 * torch.arange(num_blocks).flip(0)
    case.k_group, case.q_group = names.repeat_interleave(keys), names.repeat_interleave(rows)
    for name, dim in zip(("bk0", "bv0"), dims, strict=True):
        leaf = torch.randn(num_blocks * keys, heads[1], dim, dtype=torch.float64)
        case.leaves[name] = leaf.requires_grad_()
    return case


def by_row(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(out, lse, gradients): every row gathers the keys it sees, in float64."""
    leaves = case.leaves
    group = leaves["q"].shape[1] // leaves["k"].shape[1]
    outs, lses = [], []
    for r in range(len(case.slots)):
        limit = int(case.limit[r])
        first = 0 if case.window < 0 else max(0, limit - case.window)
        end = min(limit, case.live_rows)
        seen = [s for s in range(first, end) if int(case.document[s]) == int(case.q_document[r])]
        keys, values = [leaves["k"][seen]], [leaves["v"][seen]]
        for kind, (key, value) in zip(case.kinds, case.branches, strict=True):
            mine = (case.k_group == case.q_group[r]).nonzero()[:, 0]
            if kind == "d":
                mine = torch.tensor([r])
            if kind == "r":
                alike = case.row_group[: case.live_rows] == case.row_group[r]
                mine = alike.nonzero()[:, 0]
            keys.append(key[mine])
            values.append(value[mine])
        key = torch.cat(keys).repeat_interleave(group, 1)
        value = torch.cat(values).repeat_interleave(group, 1)
        scores = (leaves["q"][r] * key).sum(-1) * case.scale
        extra = leaves["sinks"][None] if "sinks" in leaves else scores[:0]
        lse = torch.cat([scores, extra]).logsumexp(0)
        outs.append(((scores - lse).exp()[..., None] * value).sum(0))
        lses.append(lse.detach())
    out = torch.stack(outs)
    grads = torch.autograd.grad(
        (out * case.cotangent).sum(), list(leaves.values()), allow_unused=True
    )
    filled = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), grads, strict=True)
    }
    return out.detach(), torch.stack(lses), filled


def by_mask(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`by_row` for longer rows: dense scores of all keys under one mask, in float64."""
    leaves = case.leaves
    group = leaves["q"].shape[1] // leaves["k"].shape[1]
    total = len(case.slots)
    row, key = torch.arange(total)[:, None], torch.arange(total)[None]
    limit = case.limit[:, None]
    live = key < case.live_rows
    first = limit - case.window if case.window >= 0 else torch.zeros_like(limit)
    same = case.q_document[:, None] == case.document[None]
    masks = [same & (key >= first) & (key < limit) & live]
    kinds = {
        "d": row == key,
        "r": (case.row_group[:, None] == case.row_group[None]) & live,
        "g": case.q_group[:, None] == case.k_group[None],
    }
    masks += [kinds[kind] for kind in case.kinds]
    keys = torch.cat([leaves["k"], *(k for k, _ in case.branches)]).repeat_interleave(group, 1)
    values = torch.cat([leaves["v"], *(v for _, v in case.branches)]).repeat_interleave(group, 1)
    mask = torch.cat(masks, 1)[:, None]
    scores = torch.einsum("rhd,shd->rhs", leaves["q"], keys) * case.scale
    scores = scores.masked_fill(~mask, -torch.inf)
    if "sinks" in leaves:
        sink = leaves["sinks"][None, :, None].expand(total, -1, 1)
        scores = torch.cat([scores, sink], 2)
        mask = torch.cat([mask.expand_as(scores[..., :-1]), torch.ones_like(sink) > 0], 2)
    seen = mask.any(-1)
    weights = scores.masked_fill(~seen.expand(scores.shape[:2])[..., None], 0.0).softmax(-1)
    weights = weights * mask
    out = torch.einsum("rhs,shd->rhd", weights[..., : len(keys)], values)
    inputs = list(leaves.values())
    grads = torch.autograd.grad((out * case.cotangent).sum(), inputs, materialize_grads=True)
    return out.detach(), scores.logsumexp(-1).detach(), dict(zip(leaves, grads, strict=True))


def on_ranks(
    case: Case, cp: int, strategy: str, *, dtype: torch.dtype = torch.float64, merge: str = "aten",
    attention: str = "auto", processes: bool = False, device: str = "cpu",
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """The lowered operator on ``cp`` threads or processes, put back into packed order."""
    # kernels of a GPU are compiled while other ranks wait
    plan = Plan(cp=cp, timeout_s=20.0 if device == "cpu" else 90.0)
    threads = [] if processes else thread_worlds(plan, torch.device(device))
    slots = case.slots
    n = len(slots) // cp

    def body(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        cpu = torch.device("cpu")
        world = open_world(join(cp, timeout_s=20.0), plan, cpu) if processes else threads[rank]
        rows = slots[rank * n : (rank + 1) * n]
        local = {name: x.detach().to(dtype) for name, x in case.leaves.items()}
        own = {"q"} | {f"b{x}{i}" for x in "kv" for i, kind in enumerate(case.kinds) if kind == "d"}
        own |= {"k", "v"} if strategy != "local" else set()
        for name, x in local.items():
            part = x[rows] if name in own else x
            local[name] = part.clone().to(device).requires_grad_()
        numbers = range(len(case.kinds))
        with bind(RunContext(world.fabrics, options={"attention": attention})):
            read = slots if "pass_q" in strategy else rows
            groups = [
                (case.row_group, case.row_group[rows]) if kind == "r"
                else (case.k_group, case.q_group[rows]) for kind in case.kinds
            ]  # fmt: skip
            out, lse = torch.ops.spec_compile.context_attention(
                local["q"], local["k"], local["v"],
                [local[f"bk{i}"] for i in numbers], [local[f"bv{i}"] for i in numbers],
                [k_group.to(device) for k_group, _ in groups],
                [q_group.to(device) for _, q_group in groups],
                case.limit[read].to(device), case.q_document[read].to(device),
                case.document.to(device), slots.to(device), case.live_rows, local.get("sinks"),
                case.scale, case.window, case.kinds, strategy, merge, "cp",
            )  # fmt: skip
            assert out.is_contiguous()
            assert out.dtype == dtype
            assert not lse.requires_grad
            # on a GPU all backwards share one thread, where a rank would wait for a later one
            with torch.autograd.set_multithreading_enabled(device == "cpu"):
                out.backward(case.cotangent[rows].to(device, dtype))
        grads = {
            name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in local.items()
        }
        whole = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in case.leaves.items()}
        for name, grad in grads.items():
            at = rows if name in own else slice(None)
            whole[name][at] = grad.double().cpu()
        if processes:
            world.close()
        return out.detach().double().cpu(), lse.double().cpu(), whole

    results = run_processes(cp, body) if processes else run_threads(cp, body)
    out = torch.empty_like(case.cotangent)
    lse = torch.empty(case.cotangent.shape[:2], dtype=torch.float64)
    for rank, (part, part_lse, _) in enumerate(results):
        out[slots[rank * n : (rank + 1) * n]] = part
        lse[slots[rank * n : (rank + 1) * n]] = part_lse
    grads = {
        name: torch.stack([result[2][name] for result in results]).sum(0) for name in case.leaves
    }
    return out, lse, grads


def by_readers(case: Case, factors: tuple[float, ...]) -> dict[str, Tensor]:
    """Gradients of q, k and v where q times each factor reads the same keys, by `by_mask`."""
    total = {name: torch.zeros_like(case.leaves[name]) for name in "qkv"}
    for factor in factors:
        q = (case.leaves["q"].detach() * factor).requires_grad_()
        _, _, grads = by_mask(replace(case, leaves=case.leaves | {"q": q}))
        for name, by in (("q", factor), ("k", 1.0), ("v", 1.0)):
            total[name] = total[name] + grads[name] * by
    return total


def gathered_on_ranks(
    case: Case, cp: int, factors: tuple[float, ...], *, dtype: torch.dtype, attention: str = "auto",
    merge: str = "aten", device: str = "cpu",
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients of `by_readers`, where ``cp`` threads gather keys and values once for all readers."""
    worlds = thread_worlds(Plan(cp=cp, timeout_s=90.0), torch.device(device))
    ops, n = torch.ops.spec_compile, len(case.slots) // cp

    def body(rank: int) -> dict[str, Tensor]:
        rows = case.slots[rank * n : (rank + 1) * n]
        leaves = {
            name: case.leaves[name].detach()[rows].to(device, dtype).requires_grad_()
            for name in "qkv"
        }
        slots, document = case.slots.to(device), case.document.to(device)
        limit, q_document = (x[rows].to(device) for x in (case.limit, case.q_document))
        with bind(RunContext(worlds[rank].fabrics, options={"attention": attention})):
            k, v = (ops.gather_packed(leaves[name], slots, "cp") for name in "kv")
            outs = [
                ops.context_attention(
                    leaves["q"] * factor, k, v, [], [], [], [], limit, q_document, document, slots,
                    case.live_rows, None, case.scale, case.window, "", "local", merge, "cp",
                )[0] for factor in factors
            ]  # fmt: skip
            # on a GPU all backwards share one thread, where a rank would wait for a later one
            with torch.autograd.set_multithreading_enabled(device == "cpu"):
                torch.autograd.backward(
                    outs, [case.cotangent[rows].to(device, dtype)] * len(factors)
                )
        return {name: _gradient(x) for name, x in leaves.items()}

    results = run_threads(cp, body, timeout=120.0)
    return {
        name: torch.cat([found[name] for found in results])[torch.argsort(case.slots)]
        for name in "qkv"
    }


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad.double().cpu()


def check(
    case: Case, cp: int, strategy: str, *, tolerance: float = 1e-10, **options: object
) -> None:
    """Compare forward, log-sum-exp and every gradient with `by_row`."""
    want, want_lse, want_grads = by_row(case)
    out, lse, grads = on_ranks(case, cp, strategy, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=tolerance, atol=tolerance)
    # all at once: a failure names the gradient
    torch.testing.assert_close(grads, want_grads, rtol=tolerance, atol=tolerance)

"""Shifts over the whole packed row, on several ranks with dead rows, against plain indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.plan import Plan
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.layout import plan_layout
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads

ops = torch.ops.spec_compile
LENGTHS = ((7, 1, 9), (2,), (1,), (), (5, 3, 9, 4))


def plain(x: Tensor, k: int, ends: str, value: float) -> Tensor:
    """One row at a time, as a sentence says it."""
    total, out = len(x), torch.full_like(x, value)
    for t in range(total):
        if ends == "join" and abs(k) >= total:
            out[t] = x[t]
        elif ends != "fill" or 0 <= t + k < total:
            out[t] = x[(t + k) % total]
    return out


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("ends", ["fill", "roll", "join"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_row_shift_equals_plain_indexing_with_its_gradient(
    cp: int, ends: str, lengths: tuple[int, ...]
) -> None:
    slots = torch.from_numpy(plan_layout(lengths, cp).slots)
    live, n = sum(lengths), len(slots) // cp
    x, weight = torch.randn(2, len(slots), 3, dtype=torch.float64)
    worlds = thread_worlds(Plan(cp=cp, timeout_s=20.0))

    def body(rank: int) -> None:
        own = slots[rank * n : (rank + 1) * n]
        kept, alive = own[own < live], own < live
        for k in (-40, -3, -1, 0, 1, 2, 40):
            leaf = x[:live].clone().requires_grad_()
            want = plain(leaf, k, ends, 0.5) + 0 * leaf
            (grad,) = torch.autograd.grad((want * weight[:live]).sum(), leaf)
            with bind(RunContext(worlds[rank].fabrics)):
                rows = x[own].requires_grad_()
                out = ops.row_shift_rows(rows, k, ends, 0.5, slots, live, "cp")
                (out * weight[own]).sum().backward()
                whole = ops.row_shift_whole(x, k, ends, 0.5, live)
            assert rows.grad is not None
            assert torch.equal(out[alive], want[kept])
            assert torch.equal(rows.grad[alive], grad[kept])
            assert not rows.grad[~alive].any()
            assert torch.equal(whole[:live], want)
            assert (whole[live:] == 0.5).all()

    run_threads(cp, body)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_row_shift_takes_any_type(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    with bind(RunContext(thread_worlds(Plan())[0].fabrics)):
        got = ops.row_shift_rows(x, 1, "fill", 1.0, torch.arange(5), 5, "cp")
    assert torch.equal(got, torch.tensor([1, 1, 0, 1, 1]).to(dtype))
    assert torch.equal(got, ops.row_shift(x, 1, "fill", 1.0))
    assert torch.equal(ops.row_shift_whole(x, -2, "roll", 0.0, 5), x.roll(2))
    assert torch.equal(ops.row_shift(x, 7, "join", 0.0), x)

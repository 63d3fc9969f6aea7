"""Generated attention kernels under Triton's interpreter; `test_interpreted.py` runs this file too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spec_compile.codegen.attention import Cotangent
from spec_compile.runtime.attention import blocks, generated, host
from spec_compile.runtime.attention import dense as dense_blocks
from spec_compile.runtime.attention.backends import BACKENDS
from spec_compile.runtime.attention.interface import Cut
from spec_compile.runtime.attention.intervals import Intervals
from spec_compile.runtime.attention.products import Math
from spec_compile.runtime.layout import plan_layout
from tests.codegen.interpreted import DTYPES, draw
from tests.runtime.attention.cases import by_readers, check, gathered_on_ranks, make_case


@pytest.mark.parametrize("strategy", ["local", "ring"])
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"kinds": "dg", "sinks": True, "blind": True}, (7, 21, 1, 35, 0, 3)),
        ({"kinds": "r", "window": 5, "wide": True, "dims": (24, 40)}, (9, 1, 13)),
        ({"heads": (4, 1), "window": 50}, (140, 3)),
    ],
)
def test_attention_by_generated_kernels(
    options: dict[str, object], lengths: tuple[int, ...], strategy: str
) -> None:
    case = make_case(lengths, 2, **options)  # type: ignore[arg-type]
    check(case, 2, strategy, dtype=torch.float32, attention="triton", tolerance=3e-5)


def test_gradients_of_visited_keys_are_added_to_running_sums() -> None:
    case = make_case((9, 1, 13), 2, heads=(2, 1), window=5, blind=True)
    check(case, 2, "pass_q", dtype=torch.float32, attention="triton", tolerance=3e-5)


def dense(
    intervals: Intervals, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, lse, gradients of q, k and v) under one mask, in float64; ``k`` and ``v`` have half the heads of ``q``."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    low, high = (torch.from_numpy(x)[:, None] for x in (intervals.low, intervals.high))
    seen = (torch.arange(len(k)) >= low) & (torch.arange(len(k)) < high)
    scores = (torch.einsum("rhd,shd->rhs", leaves[0], keys) * 0.3).masked_fill(
        ~seen[:, None], -math.inf
    )
    live = seen.any(1)
    weights = scores[live].softmax(-1)
    out = grad.new_zeros(grad.shape, dtype=torch.float64)
    out = out.index_put((live.nonzero()[:, 0],), torch.einsum("rhs,shd->rhd", weights, values))
    grads = torch.autograd.grad((out * grad).sum(), leaves)
    return out.detach(), scores.logsumexp(-1).detach(), grads


def test_full_tiles_and_odd_edges() -> None:
    """Rows and keys over several tiles, some of which need no mask."""
    draws = np.random.default_rng(0)
    low = np.sort(draws.integers(0, 40, 150))
    high = np.maximum(low, np.sort(draws.integers(30, 171, 150)))
    high[17] = low[17]
    intervals = Intervals(low, high, 171)
    q, k, v = draw(150, 4, 24, "float32"), draw(171, 2, 24, "float32"), draw(171, 2, 16, "float32")
    grad = draw(150, 4, 16, "float32")
    want, want_lse, wants = dense(intervals, q, k, v, grad)
    out, lse = generated.attend(intervals, q, k, v, 0.3)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-5)
    merged = lse.masked_fill(lse == -math.inf, math.inf)
    cotangent = Cotangent(grad, merged, (grad * out).sum(-1))
    grads = generated.attend_backward(intervals, cotangent, q, k, v, 0.3)
    for got, expected in zip(grads, wants, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [("float32", "float32"), ("float16", "float32"), ("float16", "bfloat16")],
)
def test_gradients_are_added_to_running_sums_where_some_row_sees_the_keys(
    dtype: str, sum_dtype: str
) -> None:
    """Keys of 64 or more to the next one seen hold NaN, whose bits stay; 331 keys are no whole tiles."""
    low = np.array([70] * 40 + [9] * 3 + [210] * 30 + [320] * 7)
    high = low + np.array([0, *range(1, 40), 0, 2, 0, *range(1, 31), *range(5, 12)])
    intervals = Intervals(low, high, 331)
    k, v = draw(331, 2, 24, dtype), draw(331, 2, 40, dtype)
    q, grad = draw(80, 4, 24, dtype), draw(80, 4, 40, dtype)
    out, lse, wants = dense(intervals, q, k, v, grad)
    lse = lse.float().masked_fill(lse == -math.inf, math.inf)
    cotangent = Cotangent(grad, lse, (grad.double() * out).sum(-1).float())
    untouched = [slice(128, 192), slice(256, 320)]
    begun = draw(331, 2, 24, sum_dtype), draw(331, 2, 40, sum_dtype)
    for total in begun:
        for keys in untouched:
            total[keys] = math.nan
    onto = begun[0].clone(), begun[1].clone()
    dq, *found = generated.attend_backward(intervals, cotangent, q, k, v, 0.3, onto=onto)
    torch.testing.assert_close(dq.double(), wants[0], rtol=DTYPES[dtype], atol=10 * DTYPES[dtype])
    bound = max(DTYPES[dtype], DTYPES[sum_dtype])
    for got, total, before, want in zip(found, onto, begun, wants[1:], strict=True):
        assert got is total
        for keys in untouched:
            assert torch.equal(total[keys].view(torch.uint8), before[keys].view(torch.uint8))
            total[keys], before[keys], want[keys] = 0.0, 0.0, 0.0
        expected = before.double() + want
        torch.testing.assert_close(total.double(), expected, rtol=bound, atol=10 * bound)
        unseen = (want == 0).all(-1)
        assert torch.equal(total[unseen], before[unseen])


class InBlocks(Math):
    """Plain products for the blocks, the generated kernels for what they leave."""

    cut = Cut.DENSE


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cases of a few hundred rows have dense blocks, and leave odd rests."""
    monkeypatch.setattr(dense_blocks, "LEAST_SCORES", 1 << 8)
    monkeypatch.setattr(dense_blocks, "LEADING_BITS", 3)
    monkeypatch.setitem(BACKENDS, "math", InBlocks())
    blocks._plans.clear()
    host.plans.clear()
    yield
    blocks._plans.clear()
    host.plans.clear()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("attention", ["triton", "math"])
def test_readers_of_gathered_keys_add_to_one_running_sum(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    onto: list[object] = []
    backward = generated.attend_backward

    def watched(*args: Any, **options: Any) -> Any:
        onto.append(options.get("onto"))
        return backward(*args, **options)

    monkeypatch.setattr(generated, "attend_backward", watched)
    lengths = (17, 40, 1, 23, 0, 9)
    slots = torch.from_numpy(plan_layout(lengths, 2).slots)
    case = make_case(lengths, 2, slots=slots, heads=(2, 1), dims=(24, 40), blind=True)
    factors = (1.0, 0.5, -0.7)
    grads = gathered_on_ranks(case, 2, factors, dtype=torch.float32, attention=attention)
    torch.testing.assert_close(grads, by_readers(case, factors), rtol=5e-5, atol=5e-5)
    # what a rank's first reader does depends on how many keys it sees
    assert sum(x is not None for x in onto) >= 2 * 2

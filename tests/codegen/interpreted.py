"""Generated kernels under Triton's interpreter; `test_interpreted.py` runs this file in a process of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from spec_compile.codegen.attention import Cotangent
from spec_compile.codegen.diagonal import DiagonalShape, diagonal_kernel, launch_diagonal_backward
from spec_compile.codegen.merge import MergeShape, launch_merge, merge_kernel
from spec_compile.codegen.row_dot import launch_row_dot
from spec_compile.runtime.attention import generated
from spec_compile.runtime.attention.intervals import Intervals
from spec_compile.runtime.attention.merges import merge_backend
from tests.runtime.attention.cases import check, make_case

DTYPES = {"float32": 2e-6, "bfloat16": 1e-2, "float64": 1e-12}


@pytest.fixture(autouse=True)
def _new_memory_holds_nan() -> Iterator[None]:
    """Whatever a kernel leaves unwritten shows as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(rows: int, heads: int, dim: int, dtype: str) -> Tensor:
    return torch.randn(rows, heads, dim, dtype=torch.float64).to(getattr(torch, dtype))


def softmax_merge(
    outs: list[Tensor], scores: list[Tensor], sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Float64 merge of finite-or-minus-infinity scores, one row at a time."""
    rows, heads, dim = outs[0].shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for r in range(rows):
        for h in range(heads):
            pairs = [(float(s[r, h]), o[r, h].double()) for s, o in zip(scores, outs, strict=True)]
            pairs = [(s, o) for s, o in pairs if math.isfinite(s)]
            if sink is not None:
                pairs.append((float(sink[h]), torch.zeros(dim, dtype=torch.float64)))
            if pairs:
                weights = torch.tensor([s for s, _ in pairs], dtype=torch.float64)
                lse[r, h] = weights.logsumexp(0)
                for weight, (_, o) in zip(weights.softmax(0), pairs, strict=True):
                    out[r, h] += weight * o
    return out, lse


def merge_of(
    outs: list[Tensor], scores: list[Tensor], out_dtype: str, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = MergeShape(
        partial_dtypes=tuple(str(o.dtype).removeprefix("torch.") for o in outs),
        num_heads=outs[0].shape[1], value_dim=outs[0].shape[2], out_dtype=out_dtype,
        sinks_dtype="" if sink is None else str(sink.dtype).removeprefix("torch."),
    )  # fmt: skip
    return launch_merge(shape, list(zip(outs, scores, strict=True)), outs[0], [], sink)


def test_this_process_interprets() -> None:
    assert merge_backend(torch.device("cpu")) == "triton-interpreted"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_partials", [1, 2, 3, 5])
@pytest.mark.parametrize("dim", [48, 80, 96])
def test_merge_equals_float64(num_partials: int, dim: int, dtype: str) -> None:
    work = torch.float64 if dtype == "float64" else torch.float32
    outs = [draw(7, 3, dim, dtype) for _ in range(num_partials)]
    scores = [(5 * torch.randn(7, 3)).to(work) for _ in range(num_partials)]
    sink = torch.randn(3, dtype=work) if num_partials % 2 else None
    want, want_lse = softmax_merge(outs, scores, sink)
    out, lse = merge_of(outs, scores, dtype, sink)
    assert out.dtype == getattr(torch, dtype)
    torch.testing.assert_close(out.double(), want, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mark", [-math.inf, math.inf])
def test_rows_without_keys_give_zero_whatever_their_outputs_hold(mark: float) -> None:
    outs = [draw(9, 2, 48, "float32") for _ in range(2)]
    scores = [torch.randn(9, 2) for _ in range(2)]
    for i, dead in enumerate((slice(0, 4), slice(2, 6))):
        scores[i][dead] = mark
        outs[i][dead] = math.nan
    want, want_lse = softmax_merge(outs, scores, None)
    out, lse = merge_of(outs, scores, "float32")
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)
    assert (out[2:4] == 0).all()
    assert (lse[2:4] == -math.inf).all()


@pytest.mark.parametrize("gap", [(0.0, 100.0), (-100.0, 100.0), (88.8, 0.0), (1e4, -1e4)])
def test_large_gaps_between_scores_do_not_overflow(gap: tuple[float, float]) -> None:
    outs = [draw(2, 1, 16, "float32") for _ in range(2)]
    scores = [torch.full((2, 1), value) for value in gap]
    out, lse = merge_of(outs, scores, "float32")
    torch.testing.assert_close(lse, torch.full((2, 1), max(gap)))
    torch.testing.assert_close(out, outs[gap.index(max(gap))])


def test_partials_of_two_precisions_merge() -> None:
    outs = [draw(5, 2, 16, "float32"), draw(5, 2, 16, "bfloat16")]
    scores = [torch.randn(5, 2) for _ in range(2)]
    want, _ = softmax_merge(outs, scores, None)
    out, _ = merge_of(outs, scores, "float32")
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)


def test_diagonal_scores_are_fused_into_the_merge() -> None:
    q, out0, score0 = draw(6, 4, 24, "float64"), draw(6, 4, 40, "float64"), draw(6, 4, 1, "float64")
    keys, values = draw(6, 2, 24, "float64"), draw(6, 2, 40, "float64")
    shape = MergeShape(
        partial_dtypes=("float64",), num_heads=4, value_dim=40, out_dtype="float64", num_diagonals=1,
        num_key_heads=2, head_dim=24, diagonal_dtype="float64", scale=0.3,
    )  # fmt: skip
    out, lse = launch_merge(shape, [(out0, score0[..., 0])], q, [(keys, values)], None)
    score1 = (q * keys.repeat_interleave(2, 1)).sum(-1) * 0.3
    want, want_lse = softmax_merge(
        [out0, values.repeat_interleave(2, 1)], [score0[..., 0], score1], None
    )
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_no_rows_launch_nothing() -> None:
    out, lse = merge_of([draw(0, 2, 16, "float32")] * 2, [torch.zeros(0, 2)] * 2, "float32")
    assert out.shape == (0, 2, 16)
    assert lse.shape == (0, 2)


def test_diagonal_backward_equals_autograd() -> None:
    """One diagonal key beside a fixed rest of the softmax."""
    q, k, v = (draw(7, h, d, "float64").requires_grad_() for h, d in ((4, 24), (2, 24), (2, 40)))
    rest, rest_lse, grad = (
        draw(7, 4, 40, "float64"),
        draw(7, 4, 1, "float64")[..., 0],
        draw(7, 4, 40, "float64"),
    )
    score = (q * k.repeat_interleave(2, 1)).sum(-1) * 0.3
    lse = torch.logaddexp(score, rest_lse)
    out = (score - lse).exp()[..., None] * v.repeat_interleave(2, 1) + (rest_lse - lse).exp()[
        ..., None
    ] * rest
    want = torch.autograd.grad((out * grad).sum(), [q, k, v])
    dq = torch.zeros(7, 4, 24, dtype=torch.float64)
    shape = DiagonalShape(
        num_heads=4, num_key_heads=2, head_dim=24, value_dim=40, dtype="float64", scale=0.3
    )
    delta = (out * grad).sum(-1).detach()
    dk, dv = launch_diagonal_backward(
        shape, grad, q.detach(), k.detach(), v.detach(), lse.detach(), delta, dq
    )
    for got, expected in zip((dq, dk, dv), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["local", "ring"])
def test_attention_over_ranks_merges_with_the_generated_kernel(strategy: str) -> None:
    case = make_case((5, 1, 9), 2, kinds="ddg", sinks=True, window=4, blind=True)
    check(case, 2, strategy, merge="triton")


def test_offsets_are_64_bit() -> None:
    merge = MergeShape(partial_dtypes=("float32",), num_heads=2, value_dim=16, out_dtype="float32")
    diagonal = DiagonalShape(
        num_heads=2, num_key_heads=2, head_dim=16, value_dim=16, dtype="float32", scale=1.0
    )
    for kernel in (merge_kernel(merge), diagonal_kernel(diagonal)):
        assert "tl.program_id(0).to(tl.int64)" in kernel.path.read_text()


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


def test_full_tiles_and_odd_edges() -> None:
    """Rows and keys over several tiles, some of which need no mask."""
    draws = np.random.default_rng(0)
    low = np.sort(draws.integers(0, 40, 150))
    high = np.maximum(low, np.sort(draws.integers(30, 171, 150)))
    high[17] = low[17]
    intervals = Intervals(low, high, 171)
    q, k, v = draw(150, 4, 24, "float32"), draw(171, 2, 24, "float32"), draw(171, 2, 16, "float32")
    grad = draw(150, 4, 16, "float32")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    key = torch.arange(171)
    seen = (key >= torch.from_numpy(low)[:, None]) & (key < torch.from_numpy(high)[:, None])
    scores = (torch.einsum("rhd,shd->rhs", leaves[0], keys) * 0.3).masked_fill(
        ~seen[:, None], -math.inf
    )
    live = seen.any(1)
    weights = scores[live].softmax(-1)
    want = torch.zeros(150, 4, 16, dtype=torch.float64)
    want = want.index_put((live.nonzero()[:, 0],), torch.einsum("rhs,shd->rhd", weights, values))
    wants = torch.autograd.grad((want * grad).sum(), leaves)
    out, lse = generated.attend(intervals, q, k, v, 0.3)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=2e-5, atol=2e-5)
    merged = lse.masked_fill(lse == -math.inf, math.inf)
    grads = tuple(torch.full(x.shape, 0.5) for x in (q, k, v))
    cotangent = Cotangent(grad, merged, (grad * out).sum(-1))
    generated.attend_backward_(intervals, cotangent, q, k, v, 0.3, grads)  # type: ignore[arg-type]
    for got, expected in zip(grads, wants, strict=True):
        torch.testing.assert_close(got.double() - 0.5, expected, rtol=3e-5, atol=3e-5)


def test_row_sums_of_a_product() -> None:
    x, y = draw(7, 3, 48, "bfloat16"), draw(7, 3, 48, "bfloat16")
    torch.testing.assert_close(
        launch_row_dot(x, y), (x.float() * y.float()).sum(-1), rtol=1e-5, atol=1e-5
    )

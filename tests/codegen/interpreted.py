"""Generated kernels under Triton's interpreter; `test_interpreted.py` runs this in a process of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spec_compile.codegen.block_branch import (
    BlockShape,
    block_kernel,
    launch_block_backward,
    launch_merge_block,
)
from spec_compile.codegen.diagonal import DiagonalShape, diagonal_kernel, launch_diagonal_backward
from spec_compile.codegen.merge import MergeShape, launch_merge, merge_kernel
from spec_compile.codegen.row_dot import launch_row_dot
from spec_compile.codegen.sum_parts import SumShape, launch_sum, sum_kernel
from spec_compile.runtime.attention.merges import merge_backend
from tests.runtime.attention.cases import (
    block_case,
    check,
    make_case,
)

DTYPES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-12}


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
def test_a16_rows_without_keys_give_zero_whatever_their_outputs_hold(mark: float) -> None:
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
def test_a17_large_gaps_between_scores_do_not_overflow(gap: tuple[float, float]) -> None:
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


def beside_the_rest(
    q: Tensor, branches: list[tuple[Tensor, Tensor]], seen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, rest, its lse) of keys ``seen`` [R, S], of all branches alike, and a fixed rest of the softmax."""
    rows, heads, value_dim = len(q), q.shape[1], branches[0][1].shape[2]
    group = heads // branches[0][0].shape[1]
    rest, rest_lse = draw(rows, heads, value_dim, "float64"), draw(rows, heads, 1, "float64")
    scores = [
        torch.einsum("rhd,shd->rhs", q, k.repeat_interleave(group, 1)).mul(0.3)
        .masked_fill(~seen[:, None], -math.inf) for k, _ in branches
    ]  # fmt: skip
    lse = torch.cat([rest_lse, *scores], 2).logsumexp(2)
    out = (rest_lse - lse[..., None]).exp() * rest
    for score, (_, v) in zip(scores, branches, strict=True):
        weights = (score - lse[..., None]).exp()
        out = out + torch.einsum("rhs,shd->rhd", weights, v.repeat_interleave(group, 1))
    return out, lse, rest, rest_lse[..., 0]


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7])
def test_diagonal_backward_equals_autograd(group: int) -> None:
    """Two branches with one key a row, beside a fixed rest of the softmax; any number of query heads a key head."""
    q, *keys = (
        draw(7, h, d, "float64").requires_grad_()
        for h, d in ((2 * group, 24), (2, 24), (2, 40), (2, 24), (2, 40))
    )
    branches = [(keys[0], keys[1]), (keys[2], keys[3])]
    out, lse, _, _ = beside_the_rest(q, branches, torch.eye(7) > 0)
    grad = draw(7, 2 * group, 40, "float64")
    want = torch.autograd.grad((out * grad).sum(), [q, *keys])
    shape = DiagonalShape(
        num_heads=2 * group, num_key_heads=2, head_dim=24, value_dim=40, dtype="float64", scale=0.3,
        num_branches=2,
    )  # fmt: skip
    delta = (out * grad).sum(-1).detach()
    detached = [(k.detach(), v.detach()) for k, v in branches]
    dq, grads = launch_diagonal_backward(shape, grad, q.detach(), lse.detach(), delta, detached)
    for got, expected in zip((dq, *grads[0], *grads[1]), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "keys", "num_blocks", "dtype"),
    [
        (16, 16, 2, "float32"), (7, 5, 3, "float64"), (1, 1, 19, "float32"), (4, 4, 5, "float16"),
        (20, 3, 1, "float32"),
    ],
)  # fmt: skip
def test_a_branch_in_blocks_is_fused_with_its_merge_and_its_backward(
    rows: int, keys: int, num_blocks: int, dtype: str
) -> None:
    """Against autograd of a dense masked softmax in float64; a partial that a row does not see holds NaN."""
    num_rows, low = num_blocks * rows, getattr(torch, dtype)
    leaves = [
        draw(n, h, d, dtype).double().requires_grad_()
        for n, h, d in (
            (num_rows, 4, 24),
            (num_blocks * keys, 2, 24),
            (num_blocks * keys, 2, 40),
        )
    ]
    block = torch.arange(num_blocks)
    seen = block.repeat_interleave(rows)[:, None] == block.repeat_interleave(keys)
    out, lse, rest, rest_lse = beside_the_rest(leaves[0], [(leaves[1], leaves[2])], seen)
    grad = draw(num_rows, 4, 40, dtype)
    want = torch.autograd.grad((out * grad.double()).sum(), leaves)
    shape = BlockShape(
        num_heads=4, num_key_heads=2, head_dim=24, value_dim=40, dtype=dtype, scale=0.3, rows=rows,
        keys=keys, partial_dtypes=("float64", dtype), out_dtype=dtype,
    )  # fmt: skip
    q, k, v = (x.detach().to(low) for x in leaves)
    work = getattr(torch, shape.work_dtype)
    blind = torch.full((num_rows, 4), math.inf, dtype=work)
    partials = [(rest, rest_lse.to(work)), (torch.full_like(grad, math.nan), blind)]
    got, got_lse = launch_merge_block(shape, q, k, v, partials, None)
    tolerance = 5 * DTYPES[dtype]
    torch.testing.assert_close(got.double(), out.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_lse.double(), lse.detach(), rtol=tolerance, atol=tolerance)
    delta = (out * grad.double()).sum(-1).detach().to(work)
    grads = launch_block_backward(shape, grad, q, k, v, lse.detach().to(work), delta)
    for part, expected in zip(grads, want, strict=True):
        error = float((part.double() - expected).norm() / expected.norm())
        assert error <= tolerance


def test_a_branch_in_blocks_may_be_all_there_is_beside_a_sink() -> None:
    q, k, v = draw(8, 2, 16, "float32"), draw(8, 2, 16, "float32"), draw(8, 2, 16, "float32")
    sink = torch.randn(2)
    shape = BlockShape(
        num_heads=2, num_key_heads=2, head_dim=16, value_dim=16, dtype="float32", scale=0.3, rows=4,
        keys=4, sinks_dtype="float32", out_dtype="float32",
    )  # fmt: skip
    out, lse = launch_merge_block(shape, q, k, v, [], sink)
    scores = torch.einsum("brhd,bkhd->brhk", *(x.double().view(2, 4, 2, 16) for x in (q, k))) * 0.3
    scores = torch.cat([scores, sink.double().view(1, 1, 2, 1).expand(2, 4, 2, 1)], 3)
    want = torch.einsum(
        "brhk,bkhd->brhd", scores.softmax(3)[..., :-1], v.double().view(2, 4, 2, 16)
    )
    torch.testing.assert_close(out.double(), want.reshape(8, 2, 16), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(3).view(8, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_parts_of_a_gradient_are_added_up_in_order(accumulate: bool, placed: bool) -> None:
    parts = [(0, draw(9, 2, 20, "float32")), (4, draw(3, 2, 20, "bfloat16"))]
    parts.append((9, draw(2, 2, 20, "float32")))
    sorted_sum = torch.zeros(11, 2, 20, dtype=torch.float64)
    for first, part in parts:
        sorted_sum[first : first + len(part)] += part.double()
    places = torch.tensor([3, -1, 10, 5, 0, 9, -1], dtype=torch.int32) if placed else None
    want = sorted_sum
    if places is not None:
        want = torch.where((places >= 0)[:, None, None], sorted_sum[places.clamp_min(0)], 0.0)
    onto = draw(len(want), 2, 20, "float32")
    out = onto.clone() if accumulate else torch.empty_like(onto)
    shape = SumShape(
        part_dtypes=("float32", "bfloat16", "float32"), out_dtype="float32", num_heads=2, dim=20,
        accumulate=accumulate, has_places=placed,
    )  # fmt: skip
    launch_sum(shape, out, parts, places)
    if accumulate:
        want = want + onto.double()
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["local", "ring"])
def test_attention_over_ranks_merges_with_the_generated_kernel(strategy: str) -> None:
    case = make_case((5, 1, 9), 2, kinds="ddg", sinks=True, window=4, blind=True)
    check(case, 2, strategy, merge="triton")


def test_attention_with_a_branch_in_blocks_by_generated_kernels() -> None:
    check(block_case(5, 4, 3, sinks=True), 1, "local", merge="triton", tolerance=1e-9)


def test_a31_offsets_are_64_bit() -> None:
    merge = MergeShape(partial_dtypes=("float32",), num_heads=2, value_dim=16, out_dtype="float32")
    diagonal = DiagonalShape(
        num_heads=2, num_key_heads=2, head_dim=16, value_dim=16, dtype="float32", scale=1.0
    )
    block = BlockShape(
        num_heads=2, num_key_heads=2, head_dim=16, value_dim=16, dtype="float32", scale=1.0, rows=2,
        keys=2, out_dtype="float32",
    )  # fmt: skip
    parts = SumShape(part_dtypes=("float32",), out_dtype="float32", num_heads=2, dim=16)
    blocks = (block_kernel(block, name) for name in ("merge_block", "block_backward"))
    for kernel in (merge_kernel(merge), diagonal_kernel(diagonal), sum_kernel(parts), *blocks):
        assert "tl.program_id(0).to(tl.int64)" in kernel.path.read_text()


def test_row_sums_of_a_product() -> None:
    x, y = draw(7, 3, 48, "bfloat16"), draw(7, 3, 48, "bfloat16")
    torch.testing.assert_close(
        launch_row_dot(x, y), (x.float() * y.float()).sum(-1), rtol=1e-5, atol=1e-5
    )

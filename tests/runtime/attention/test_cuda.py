"""The fast backends and the lowered operator on a GPU, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spec_compile.runtime.attention import blocks, dense, host, tiles
from spec_compile.runtime.attention.backends import BACKENDS, backend_for
from spec_compile.runtime.attention.generated import Generated
from spec_compile.runtime.attention.parts import Part, add_up, add_up_plain
from spec_compile.runtime.attention.probe import probe
from spec_compile.runtime.layout import plan_layout

from .cases import (
    Case,
    block_case,
    by_mask,
    by_readers,
    gathered_on_ranks,
    make_case,
    on_ranks,
)

pytestmark = pytest.mark.gpu

LENGTHS = (137, 300, 1, 89, 0, 3, 70)
FAST = ["cudnn", "triton", "aten_flash"]
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative error in norm."""


@pytest.fixture(autouse=True)
def _small_dense_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cases of a few hundred rows go through dense blocks and leave odd rests."""
    monkeypatch.setattr(dense, "LEAST_SCORES", 1 << 8)
    monkeypatch.setattr(dense, "LEADING_BITS", 3)
    blocks._plans.clear()
    host.plans.clear()
    yield
    blocks._plans.clear()
    host.plans.clear()


def close_on_gpu(
    case: Case, cp: int, strategy: str, *, attention: str = "auto", merge: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    with torch.no_grad():
        for x in (*case.leaves.values(), case.cotangent):
            x.copy_(x.to(dtype))
    want, want_lse, want_grads = by_mask(case)
    out, lse, grads = on_ranks(
        case, cp, strategy, dtype=dtype, merge=merge, attention=attention, device="cuda"
    )
    bound = BOUNDS.get(dtype, 1e-5)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    seen = want_lse != -torch.inf
    assert (out[~seen] == 0).all()
    torch.testing.assert_close(lse[seen], want_lse[seen], rtol=1e-3, atol=1e-3)
    for name, got, expected in (("out", out, want), *((n, grads[n], want_grads[n]) for n in grads)):
        assert float((got - expected).norm()) <= bound * float(expected.norm()), name


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.float16, 128), *((torch.bfloat16, dim) for dim in (64, 80, 96, 128, 192, 256))],
)
def test_backends_pass_their_probe(name: str, dtype: torch.dtype, dim: int) -> None:
    assert probe(BACKENDS[name], torch.device("cuda"), dtype, dim, dim) is None


@pytest.mark.parametrize("name", ["cudnn", "triton"])
@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (72, 40)])
def test_key_and_value_dims_may_differ(name: str, dims: tuple[int, int]) -> None:
    assert probe(BACKENDS[name], torch.device("cuda"), torch.bfloat16, *dims) is None


def test_the_generated_kernel_takes_any_head_dim() -> None:
    assert probe(Generated(), torch.device("cuda"), torch.bfloat16, 100, 20) is None


@pytest.mark.parametrize("attention", FAST)
@pytest.mark.parametrize("strategy", ["local", "ring", "pass_q"])
@pytest.mark.parametrize("cp", [1, 3])
def test_packed_documents_by_layout(cp: int, strategy: str, attention: str) -> None:
    slots = torch.from_numpy(plan_layout(LENGTHS, cp).slots)
    case = make_case(LENGTHS, cp, slots=slots, heads=(8, 2), dims=(64, 64), kinds="dd", sinks=True)
    close_on_gpu(case, cp, strategy, attention=attention)


@pytest.mark.parametrize("attention", FAST)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80)])
def test_readers_of_gathered_packed_documents_share_a_sum(
    dims: tuple[int, int], attention: str
) -> None:
    slots = torch.from_numpy(plan_layout(LENGTHS, 3).slots)
    case = make_case(LENGTHS, 3, slots=slots, heads=(8, 2), dims=dims, blind=True)
    with torch.no_grad():
        for x in (*case.leaves.values(), case.cotangent):
            x.copy_(x.to(torch.bfloat16))
    # powers of two round nothing
    factors = (1.0, 0.5, 0.25, 1.0, 0.5)
    grads = gathered_on_ranks(
        case, 3, factors, dtype=torch.bfloat16, attention=attention, merge="auto", device="cuda"
    )
    for name, want in by_readers(case, factors).items():
        assert float((grads[name] - want).norm()) <= 1e-2 * float(want.norm()), name


@pytest.mark.parametrize("window", [1, 33, 200])
@pytest.mark.parametrize("strategy", ["local", "ring", "pass_q"])
def test_windows_blind_rows_and_groups_in_any_order(strategy: str, window: int) -> None:
    case = make_case(LENGTHS, 3, dims=(80, 80), kinds="grd", window=window, blind=True)
    close_on_gpu(case, 3, strategy)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (torch.float16, (128, 128)), (torch.bfloat16, (128, 128)), (torch.bfloat16, (192, 128)),
        (torch.bfloat16, (100, 20)), (torch.bfloat16, (256, 256)),
    ],
)  # fmt: skip
def test_head_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    slots = torch.from_numpy(plan_layout((300, 41), 2).slots)
    case = make_case((300, 41), 2, slots=slots, dims=dims, kinds="d", scale=0.1)
    close_on_gpu(case, 2, "ring", dtype=dtype)


@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (7, 7), (1, 1), (4, 6)])
def test_a_branch_in_blocks(rows: int, keys: int) -> None:
    case = block_case(rows, keys, 31, heads=(8, 2), dims=(128, 64), sinks=rows == 4)
    close_on_gpu(case, 1, "local")


def test_many_parts_of_a_gradient_in_another_order() -> None:
    like = torch.empty(40, 2, 80, device="cuda", dtype=torch.bfloat16)
    parts = [
        Part(i, torch.randn(9 + i, 2, 80, device="cuda", dtype=torch.bfloat16)) for i in range(11)
    ]
    places = torch.randperm(40, device="cuda").to(torch.int32)
    places = torch.where(places < 19, places, -1)
    onto = torch.randn(40, 2, 80, device="cuda")
    want = add_up_plain(parts, like.float(), places=places)
    torch.testing.assert_close(
        add_up(parts, like, places=places).float(), want, rtol=8e-3, atol=8e-3
    )
    got = add_up(parts, like, places=places, onto=onto.clone())
    torch.testing.assert_close(got, onto + want, rtol=1e-5, atol=1e-5)


def test_fp32_uses_products() -> None:
    assert backend_for(torch.device("cuda"), torch.float32, 64, 64) == "math"
    close_on_gpu(make_case(LENGTHS, 2, kinds="d"), 2, "ring", dtype=torch.float32)


def test_rows_without_keys_on_every_backend() -> None:
    for attention in FAST:
        case = make_case(LENGTHS, 2, dims=(64, 64), blind=True)
        close_on_gpu(case, 2, "ring", attention=attention)


def test_the_generated_kernels_give_the_same_bits_twice() -> None:
    case = make_case(LENGTHS, 2, dims=(64, 64), kinds="dg", sinks=True, window=90)
    first, second = (
        on_ranks(
            case, 2, "ring", dtype=torch.bfloat16, merge="auto", attention="triton", device="cuda"
        )
        for _ in range(2)
    )
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def test_deterministic_algorithms_leave_cudnn_out() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert backend_for(torch.device("cuda"), torch.bfloat16, 64, 64) == "triton"
    finally:
        torch.use_deterministic_algorithms(False)


def test_row_sums_by_the_generated_kernel() -> None:
    grad, out = (torch.randn(777, 8, 80, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(777, 8, device="cuda")
    delta = tiles.Merged.of(grad, out, lse).delta
    torch.testing.assert_close(delta, (grad.float() * out.float()).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_vector_changed_in_place_is_planned_again() -> None:
    plans = []
    vector = torch.arange(5, device="cuda")
    for _ in range(2):
        plans.append(
            host.remembered((vector,), (), lambda x: blocks.cached_plan(x, x, x + 1, x, x))
        )
        vector += 1
    again = host.remembered((vector.clone(),), (), lambda x: blocks.cached_plan(x, x, x + 1, x, x))
    assert plans[0] is not plans[1]
    assert again is not plans[1]

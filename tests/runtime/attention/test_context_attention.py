"""The lowered operator against attention computed row by row in float64."""

from __future__ import annotations

import pytest
import torch

from spec_compile.errors import ConfigError, InvariantError
from spec_compile.plan import Plan
from spec_compile.runtime.attention import blocks, masked
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.layout import plan_layout
from spec_compile.runtime.threads import thread_worlds

from .cases import PACKED, by_mask, by_row, check, make_case, on_ranks

STRATEGIES = ["local", "ring", "pass_q"]


@pytest.mark.parametrize(("kinds", "window", "sinks"), [("dgr", -1, True), ("r", 5, False)])
@pytest.mark.parametrize("wide", [False, True])
def test_the_two_references_agree(kinds: str, window: int, sinks: bool, wide: bool) -> None:
    case = make_case(PACKED, 2, kinds=kinds, window=window, sinks=sinks, blind=True, wide=wide)
    (out, lse, grads), (want, want_lse, wants) = by_mask(case), by_row(case)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(grads, wants)


@pytest.fixture(params=[1, 2048], ids=["small_blocks", "joined_blocks"])
def _call_cost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "CALL_COST", request.param)
    blocks._plans.clear()


@pytest.mark.usefixtures("_call_cost")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_packed_documents(cp: int, strategy: str) -> None:
    check(make_case(PACKED, cp), cp, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_rows_placed_by_the_layout_planner(cp: int, strategy: str) -> None:
    slots = torch.from_numpy(plan_layout(PACKED, cp).slots)
    check(make_case(PACKED, cp, slots=slots, kinds="d"), cp, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(3,), (1, 1, 1), (), (0, 12, 0, 0, 20, 0)])
def test_documents_shorter_than_cp_and_ranks_with_dead_rows_only(
    lengths: tuple[int, ...], strategy: str
) -> None:
    check(make_case(lengths, 4, kinds="d"), 4, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("dims", [(16, 16), (48, 48), (80, 80), (24, 16), (16, 24)])
def test_grouped_heads_and_head_dims(
    heads: tuple[int, int], dims: tuple[int, int], strategy: str
) -> None:
    check(make_case((9, 1, 14), 2, heads=heads, dims=dims, kinds="d"), 2, strategy)


@pytest.mark.usefixtures("_call_cost")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("window", [1, 5, 34, 200])
@pytest.mark.parametrize("cp", [1, 3])
def test_a_window_across_rank_edges(cp: int, window: int, strategy: str) -> None:
    check(make_case(PACKED, cp, window=window), cp, strategy)


@pytest.mark.usefixtures("_call_cost")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_two_diagonal_branches_a_general_one_and_sinks(cp: int, strategy: str) -> None:
    check(make_case(PACKED, cp, kinds="dgd", sinks=True, window=9), cp, strategy)


@pytest.mark.parametrize("attention", ["aten_cpu", "math"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kinds", ["", "g", "d"])
def test_rows_that_see_nothing(kinds: str, sinks: bool, attention: str) -> None:
    case = make_case(PACKED, 2, kinds=kinds, blind=True, sinks=sinks)
    check(case, 2, "ring", attention=attention)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_see_nothing_are_exactly_zero_with_zero_gradient(strategy: str) -> None:
    case = make_case(PACKED, 2, blind=True)
    out, lse, grads = on_ranks(case, 2, strategy)
    dead = by_row(case)[1] == -torch.inf
    assert dead.any()
    assert (out[dead] == 0).all()
    assert (lse[dead] == -torch.inf).all()
    assert (grads["q"][dead] == 0).all()


@pytest.mark.usefixtures("_call_cost")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("window", [-1, 4, 2000])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_dead_rows_are_no_keys_of_limits_and_groups_that_hold_them(
    cp: int, window: int, strategy: str
) -> None:
    for lengths in ((1,), (7, 0, 4)):
        check(make_case(lengths, cp, kinds="rd", window=window, wide=True), cp, strategy)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_invisible_keys_do_not_matter(strategy: str, wide: bool) -> None:
    """Bitwise: dead rows at the end are never real keys, whatever groups and limits say."""
    case = make_case((9, 1, 13), 4, kinds="dr", wide=wide)
    case.cotangent[23:] = 0  # no sum reads dead rows
    before = on_ranks(case, 4, strategy)
    with torch.no_grad():
        for name in ("q", "k", "v", "bk0", "bk1", "bv1"):
            case.leaves[name][23:] = 1e30
    after = on_ranks(case, 4, strategy)
    torch.testing.assert_close(after[0][:23], before[0][:23], rtol=0, atol=0)
    for name in ("q", "k", "v", "bk1", "bv1"):
        assert (after[2][name][23:] == 0).all()
        torch.testing.assert_close(after[2][name][:23], before[2][name][:23], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("attention", ["aten_cpu", "math"])
def test_fp32(attention: str, strategy: str) -> None:
    case = make_case(PACKED, 3, kinds="ddg", sinks=True)
    check(case, 3, strategy, dtype=torch.float32, attention=attention, tolerance=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype: torch.dtype, bound: float, strategy: str) -> None:
    case = make_case(PACKED, 4, kinds="ddg", sinks=True)
    with torch.no_grad():
        for x in case.leaves.values():
            x.copy_(x.to(dtype))
    want, _, want_grads = by_row(case)
    out, _, grads = on_ranks(case, 4, strategy, dtype=dtype)
    assert (out - want).abs().max() <= bound * want.abs().max()
    for name, grad in grads.items():
        assert (grad - want_grads[name]).abs().max() <= 2.5 * bound * want_grads[
            name
        ].abs().max(), name


def test_bf16_error_does_not_grow_with_the_ring() -> None:
    errors = []
    for cp in (1, 8):
        case = make_case((96,), cp, slots=torch.from_numpy(plan_layout([96], cp).slots))
        with torch.no_grad():
            for x in case.leaves.values():
                x.copy_(x.to(torch.bfloat16))
        want = by_row(case)[2]
        got = on_ranks(case, cp, "ring", dtype=torch.bfloat16)[2]
        errors.append(
            max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)
        )
    assert errors[1] <= 2 * errors[0]


def test_two_runs_give_the_same_bits() -> None:
    case = make_case(PACKED, 3, kinds="dg", sinks=True)
    first, second = (on_ranks(case, 3, "ring", dtype=torch.float32) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.dist
def test_the_ring_between_processes_gives_the_bits_of_threads() -> None:
    case = make_case(PACKED, 3, kinds="dg", sinks=True)
    ours, theirs = (
        on_ranks(case, 3, "ring", dtype=torch.bfloat16, processes=flag) for flag in (False, True)
    )
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(ours[2][name], theirs[2][name]) for name in ours[2])


def test_a_forced_backend_that_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="24 for keys and 16"):
        on_ranks(make_case((9,), 1, dims=(24, 16)), 1, "local", attention="aten_cpu")


def call(strategy: str = "local") -> tuple[torch.Tensor, torch.Tensor]:
    case = make_case((9,), 1)
    leaves, slots = case.leaves, case.slots
    out, lse = torch.ops.spec_compile.context_attention(
        leaves["q"], leaves["k"], leaves["v"], [], [], [], [], case.limit, case.q_document,
        case.document, slots, 9, None, 0.3, -1, "", strategy, "aten", "cp",
    )  # fmt: skip
    return out, lse


def test_outside_a_bound_model_it_refuses_to_run() -> None:
    with pytest.raises(InvariantError, match="bound"):
        call()


def test_an_unknown_strategy_is_refused() -> None:
    worlds = thread_worlds(Plan())
    with (
        bind(RunContext(worlds[0].fabrics)),
        pytest.raises(ConfigError, match="'local', 'ring'"),
    ):
        call("all_gather")


def test_it_traces_with_fake_values_outside_a_bound_model() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(6, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.empty(6, 2, 16, dtype=torch.bfloat16),
            torch.empty(6, 2, 24, dtype=torch.bfloat16),
        )
        index = torch.empty(6, dtype=torch.int64)
        out, lse = torch.ops.spec_compile.context_attention(
            q,
            k,
            v,
            [],
            [],
            [],
            [],
            index,
            index,
            index,
            index,
            6,
            None,
            0.3,
            -1,
            "",
            "ring",
            "aten",
            "cp",
        )
    assert out.shape == (6, 4, 24)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (6, 4)
    assert lse.dtype == torch.float32

"""Row operators on several ranks against plain indexing on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import spec_compile.runtime.kernels  # noqa: F401  (registers the operators)
from spec_compile.errors import InvariantError
from spec_compile.ir import reference
from spec_compile.plan import Plan
from spec_compile.runtime.context import RunContext, bind, current
from spec_compile.runtime.fabric import Fabric
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads
from tests.runtime.attention.cases import PACKED, make_case

ops = torch.ops.spec_compile
CP = [1, 2, 3, 4]


def on_ranks(cp: int, body: Callable[[int], Tensor]) -> list[Tensor]:
    worlds = thread_worlds(Plan(cp=cp, timeout_s=20.0))

    def bound(rank: int) -> Tensor:
        with bind(RunContext(worlds[rank].fabrics)):
            return body(rank)

    return run_threads(cp, bound)


def own(slots: Tensor, cp: int, rank: int) -> Tensor:
    n = len(slots) // cp
    return slots[rank * n : (rank + 1) * n]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cp", CP)
def test_shard_rows_takes_own_rows(cp: int, dtype: torch.dtype) -> None:
    slots = make_case(PACKED, cp).slots
    x = torch.randint(0, 2, (3, len(slots), 2)).to(dtype)
    for rank, part in enumerate(on_ranks(cp, lambda rank: ops.shard_rows(x, slots, 1, "cp"))):
        assert torch.equal(part, x[:, own(slots, cp, rank)])


def test_shard_rows_refuses_a_value_with_gradient_and_a_wrong_length() -> None:
    x, slots = torch.zeros(4, requires_grad=True), torch.arange(4)
    with pytest.raises(InvariantError, match="needs a gradient"):
        on_ranks(1, lambda rank: ops.shard_rows(x, slots, 0, "cp"))
    with pytest.raises(InvariantError, match="4 rows"):
        on_ranks(1, lambda rank: ops.shard_rows(torch.zeros(5), slots, 0, "cp"))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("cp", CP)
def test_gather_rows_concatenates_and_sums_gradients(cp: int, dim: int) -> None:
    parts = [torch.randn(3, 3, 3, dtype=torch.float64) for _ in range(cp)]
    weights = [torch.randn_like(torch.cat(parts, dim)) for _ in range(cp)]

    def body(rank: int) -> Tensor:
        x = parts[rank].clone().requires_grad_()
        whole = ops.gather_rows(x, "cp", dim)
        assert torch.equal(whole, torch.cat(parts, dim))
        (whole * weights[rank]).sum().backward()
        assert x.grad is not None
        return x.grad

    want = torch.stack(weights).sum(0).chunk(cp, dim)
    for got, expected in zip(on_ranks(cp, body), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_of_gathered_halves_are_summed_in_fp32() -> None:
    """1 + 4 * 2**-8: each small share would be lost in a bf16 sum."""
    shares = [1.0, 2**-8, 2**-8, 2**-8]

    def body(rank: int) -> Tensor:
        x = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
        (ops.gather_rows(x, "cp", 0) * shares[rank]).sum().backward()
        assert x.grad is not None
        return x.grad

    for got in on_ranks(4, body):
        assert torch.equal(got.double(), torch.full((2,), sum(shares)).bfloat16().double())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_gather_rows_takes_integers(dtype: torch.dtype) -> None:
    got = on_ranks(2, lambda rank: ops.gather_rows(torch.full((2,), rank).to(dtype), "cp", 0))
    assert torch.equal(got[0], torch.tensor([0, 0, 1, 1]).to(dtype))


def shifted(x: Tensor, k: int, document: Tensor, live: int) -> Tensor:
    """The shift of the live rows alone; zeros at dead ones."""
    want = reference.shift(x[:live], k, document[:live])
    return torch.cat([want, torch.zeros_like(x[live:])])


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("lengths", [PACKED, (2,), (5, 3, 9), ()])
@pytest.mark.parametrize("k", [-40, -2, -1, 0, 1, 3, 100])
@pytest.mark.parametrize("cp", CP)
def test_shift_rows_equals_the_shift_on_one_device(
    cp: int, k: int, lengths: tuple[int, ...], one: bool
) -> None:
    """Also when the user's document vector makes dead rows part of a document."""
    case = make_case(lengths, cp, wide=one)
    live = case.live_rows
    x = torch.randn(len(case.slots), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    want = shifted(x, k, case.document, live)
    (want_grad,) = torch.autograd.grad((want * weight).sum(), x)

    def body(rank: int) -> Tensor:
        rows = own(case.slots, cp, rank)
        local = x.detach()[rows].clone().requires_grad_()
        out = ops.shift_rows(local, k, case.document, case.slots, live, "cp")
        assert torch.equal(out, want[rows])
        (out * weight[rows]).sum().backward()
        assert local.grad is not None
        return local.grad

    for rank, grad in enumerate(on_ranks(cp, body)):
        assert torch.equal(grad, want_grad[own(case.slots, cp, rank)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("k", [-40, -2, 0, 1, 100])
def test_shift_whole_shifts_live_rows_alone(k: int, dtype: torch.dtype) -> None:
    for lengths, wide in ((PACKED, False), ((5, 0, 3), True), ((1,), True), ((), True)):
        case = make_case(lengths, 4, wide=wide)
        x = (5 * torch.rand(len(case.slots), 2)).to(dtype)
        got = ops.shift_whole(x, k, case.document, case.live_rows)
        assert torch.equal(got, shifted(x, k, case.document, case.live_rows))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_shift_rows_takes_integers(dtype: torch.dtype) -> None:
    case = make_case(PACKED, 3)
    x = torch.randint(0, 2, (len(case.slots),)).to(dtype)
    want = shifted(x, 1, case.document, case.live_rows)
    parts = on_ranks(
        3,
        lambda rank: ops.shift_rows(
            x[own(case.slots, 3, rank)], 1, case.document, case.slots, case.live_rows, "cp"
        ),
    )
    for rank, part in enumerate(parts):
        assert torch.equal(part, want[own(case.slots, 3, rank)])


def test_shift_rows_moves_only_the_rows_that_another_rank_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two halves of one document: one row crosses, in one direction."""
    from spec_compile.runtime.collectives import PairwiseFabric

    moved: list[int] = []
    exchange = PairwiseFabric.exchange

    def counting(self: Fabric, send: list[Tensor], *rest: object) -> list[Tensor]:
        moved.append(sum(len(x) for x in send))
        return exchange(self, send, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PairwiseFabric, "exchange", counting)
    slots, document, x = torch.arange(20), torch.zeros(20, dtype=torch.int64), torch.randn(10, 4)
    on_ranks(2, lambda rank: ops.shift_rows(x, 1, document, slots, 20, "cp"))
    assert sorted(moved) == [0, 1]


@pytest.mark.parametrize("cp", CP)
def test_sum_rows_sums_values_and_gradients(cp: int) -> None:
    x, weight = torch.randn(2, cp, 5, dtype=torch.float64).unbind()

    def body(rank: int) -> Tensor:
        local = x[rank].clone().requires_grad_()
        out = ops.sum_rows(local, "cp")
        torch.testing.assert_close(out, x.sum(0))
        assert torch.equal(local, x[rank])
        (out * weight[rank]).sum().backward()
        assert local.grad is not None
        return local.grad

    for grad in on_ranks(cp, body):
        torch.testing.assert_close(grad, weight.sum(0))


def test_outside_a_bound_model_the_operators_refuse_to_run() -> None:
    with pytest.raises(InvariantError, match="bound"):
        ops.sum_rows(torch.zeros(3), "cp")


def readers_of(slots: Tensor, x: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Attention of every row to keys up to its own, from as many readers as there are factors."""
    n, index = len(x), torch.arange(len(slots))
    keys = ops.gather_packed(x, slots, "cp")
    rank = current().fabrics["cp"].rank
    rows, document = slots[rank * n : (rank + 1) * n], torch.zeros_like(index)
    outs = [
        ops.context_attention(
            x.detach() * factor, keys, keys, [], [], [], [], rows + 1, document[rows], document, slots,
            len(slots), None, 0.3, -1, "", "local", "aten", "cp",
        )[0] for factor in factors
    ]  # fmt: skip
    total: Tensor = torch.stack(outs).sum(0) + keys[rows].sin()
    return total


@pytest.mark.parametrize("cp", CP)
def test_gather_packed_puts_rows_in_packed_order(cp: int) -> None:
    slots = make_case(PACKED, cp).slots
    whole = torch.randn(len(slots), 2, 3)
    found = on_ranks(cp, lambda r: ops.gather_packed(whole[own(slots, cp, r)], slots, "cp"))
    assert all(torch.equal(x, whole) for x in found)


@pytest.mark.parametrize("cp", CP)
def test_one_sum_of_gradients_serves_all_readers_of_gathered_rows(cp: int) -> None:
    slots = make_case(PACKED, cp).slots
    whole = torch.randn(len(slots), 2, 8, dtype=torch.float64)

    def gradient(factors: tuple[float, ...]) -> Tensor:
        def body(rank: int) -> Tensor:
            x = whole[own(slots, cp, rank)].requires_grad_()
            out = readers_of(slots, x, factors)
            # a second backward through the same graph starts with nothing
            for _ in range(2):
                x.grad = None
                out.sum().backward(retain_graph=True)
            assert x.grad is not None
            return x.grad

        return torch.cat(on_ranks(cp, body))

    x = whole.clone().requires_grad_()
    x.sin().sum().backward()
    alone = x.grad
    assert alone is not None
    together = torch.zeros_like(whole)
    together[slots] = gradient((1.0, -0.5, 2.0))
    apart = torch.zeros_like(whole)
    for factor in (1.0, -0.5, 2.0):
        apart[slots] += gradient((factor,)) - alone[slots]
    torch.testing.assert_close(together, apart + alone)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_backward_that_ends_before_the_gather_leaves_nothing_to_the_next(readers: int) -> None:
    slots = make_case(PACKED, 2).slots
    whole = torch.randn(len(slots), 2, 8, dtype=torch.float64)

    def gradient(rank: int, *, partial: bool) -> Tensor:
        rows, index = slots[rank * len(slots) // 2 :][: len(slots) // 2], torch.arange(len(slots))
        x = whole[rows].requires_grad_()
        q = whole[rows].requires_grad_()
        keys, document = ops.gather_packed(x, slots, "cp"), torch.zeros_like(index)
        outs = [
            ops.context_attention(
                q, keys, keys, [], [], [], [], rows + 1, document[rows], document, slots,
                len(slots), None, 0.3, -1, "", "local", "aten", "cp",
            )[0] for _ in range(readers)
        ]  # fmt: skip
        total = torch.stack(outs).sin().sum()
        if partial:
            torch.autograd.grad(total, [q], retain_graph=True)
        total.backward()
        assert x.grad is not None
        return x.grad

    wanted = on_ranks(2, lambda rank: gradient(rank, partial=False))
    found = on_ranks(2, lambda rank: gradient(rank, partial=True))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))

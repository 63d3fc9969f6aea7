"""Every fabric operation, on every world, against plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spec_compile.errors import ChannelError, PlanError
from spec_compile.plan import Plan
from spec_compile.runtime.collectives import PairwiseFabric, ordered_sum
from spec_compile.runtime.processes import join, open_world
from spec_compile.runtime.solo import solo_world
from spec_compile.runtime.threads import thread_worlds
from spec_compile.runtime.world import World, coordinates, group_ranks
from tests.ranks import run_processes, run_threads

CPU = torch.device("cpu")
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
Body = Callable[[World], object]


def on_threads(plan: Plan, body: Body) -> list[object]:
    worlds = thread_worlds(plan)
    return run_threads(plan.world_size, lambda rank: body(worlds[rank]))


def on_processes(plan: Plan, body: Body) -> list[object]:
    def child(rank: int) -> object:
        world = open_world(join(plan.world_size, timeout_s=plan.timeout_s), plan, CPU)
        assert world.rank == rank
        value = body(world)
        world.close()
        return value

    return run_processes(plan.world_size, child)


def alone(plan: Plan, body: Body) -> list[object]:
    return [body(solo_world(plan, CPU))]


WORLDS = [
    pytest.param(alone, 1, id="solo-1"),
    *(pytest.param(on_threads, n, id=f"threads-{n}") for n in (1, 2, 3, 4)),
    *(
        pytest.param(on_processes, n, id=f"processes-{n}", marks=pytest.mark.dist)
        for n in (1, 2, 3, 4)
    ),
]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What ``rank`` holds: reproducible anywhere."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 9).to(dtype)


def check_all_gather(fabric: PairwiseFabric, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    got = fabric.all_gather(value(fabric.rank, shape, dtype))
    want = torch.stack([value(r, shape, dtype) for r in range(fabric.size)])
    assert torch.equal(got, want)


def check_shift(fabric: PairwiseFabric, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for offset in (1, -1, 2, 0):
        mine = [value(fabric.rank, shape, dtype), value(fabric.rank, (5,), torch.float32, 1)]
        got = fabric.shift(mine, offset)
        source = (fabric.rank - offset) % fabric.size
        assert torch.equal(got[0], value(source, shape, dtype))
        assert torch.equal(got[1], value(source, (5,), torch.float32, 1))
        assert got[0].data_ptr() != mine[0].data_ptr() or not mine[0].numel()


def check_exchange(fabric: PairwiseFabric, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def part(src: int, dst: int) -> Tensor:
        return value(10 * src + dst, ((src + 2 * dst) % 3, *shape), dtype)

    ranks = range(fabric.size)
    want = [part(r, fabric.rank) for r in ranks]
    send = [part(fabric.rank, r) for r in ranks]
    got = fabric.exchange(send, [x.shape for x in want], dtype)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def check_messages(fabric: PairwiseFabric, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size, rank = fabric.size, fabric.rank
    dst, src = (rank + 1) % size, (rank - 1) % size
    for tag in (0, 7):
        for salt in (0, 1):
            fabric.send(value(rank, shape, dtype, 10 * tag + salt), dst, tag)
    for tag in (7, 0):  # tags are lanes of their own; inside one, order is kept
        for salt in (0, 1):
            got = fabric.recv(shape, dtype, src, tag)
            assert torch.equal(got, value(src, shape, dtype, 10 * tag + salt))
    fabric.flush()


MOVES = {
    "all_gather": check_all_gather,
    "shift": check_shift,
    "exchange": check_exchange,
    "messages": check_messages,
}


@pytest.mark.parametrize(("run", "size"), WORLDS)
def test_moves_keep_every_bit_of_every_dtype_and_shape(
    run: Callable[[Plan, Body], list[object]], size: int
) -> None:
    def body(world: World) -> None:
        fabric = world.fabrics["cp"]
        for check in MOVES.values():
            for dtype in DTYPES:
                for shape in ((3, 5), (), (0, 4), (1237,)):
                    check(fabric, dtype, shape)

    run(Plan(cp=size, timeout_s=20), body)


@pytest.mark.parametrize(("run", "size"), WORLDS)
def test_sums_equal_the_ordered_sum_to_the_bit_on_every_rank(
    run: Callable[[Plan, Body], list[object]], size: int
) -> None:
    def total(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        parts = [value(r, shape, dtype).to(wide) for r in range(size)]
        return functools.reduce(torch.add, parts).to(dtype)

    def body(world: World) -> None:
        fabric = world.fabrics["grads"]
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            for shape in ((7,), (), (0, 3), (20_011,), (173, 101)):  # the last two go in two rounds
                x = value(fabric.rank, shape, dtype)
                fabric.all_reduce_(x)
                assert torch.equal(x, total(shape, dtype))
                rows = value(fabric.rank, (size, *shape), dtype)
                want = total((size, *shape), dtype)[fabric.rank]
                assert torch.equal(fabric.reduce_scatter(rows), want)

    run(Plan(dp=size, timeout_s=20), body)


@pytest.mark.parametrize(("run", "size"), WORLDS[:4])
def test_strided_views_are_read_and_written_through(
    run: Callable[[Plan, Body], list[object]], size: int
) -> None:
    def body(world: World) -> None:
        fabric = world.fabrics["cp"]
        whole = torch.full((4, 6), float(fabric.rank + 1), dtype=torch.float64)
        fabric.all_reduce_(whole[:, ::2])
        sum_ = size * (size + 1) / 2
        assert torch.equal(whole[:, ::2], torch.full((4, 3), sum_, dtype=torch.float64))
        assert torch.equal(whole[:, 1::2], torch.full((4, 3), fabric.rank + 1.0).double())
        got = fabric.all_gather(value(fabric.rank, (3, 5), torch.float32).t())
        assert torch.equal(got[-1], value(size - 1, (3, 5), torch.float32).t())

    run(Plan(cp=size, timeout_s=20), body)


def test_a_large_sum_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_compile.runtime.collectives.BLOCK_BYTES", 80_000)
    shape = (50_021,)

    def body(world: World) -> None:
        x = value(world.rank, shape, torch.float64)
        world.fabrics["cp"].all_reduce_(x)
        assert torch.equal(x, ordered_sum([value(r, shape, torch.float64) for r in range(3)]))

    on_threads(Plan(cp=3, timeout_s=20), body)


def test_half_precision_adds_up_in_float32() -> None:
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert ordered_sum(parts).item() == 258.0  # 256 in steps of bfloat16


def test_a_sum_leaves_the_inputs_of_autograd_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    fabric = solo_world(Plan(), CPU).fabrics["cp"]
    out = fabric.reduce_scatter(x[None])
    assert not out.requires_grad
    out += 1
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("run", [on_threads, pytest.param(on_processes, marks=pytest.mark.dist)])
def test_fabrics_over_different_groups_do_not_mix(
    run: Callable[[Plan, Body], list[object]],
) -> None:
    plan = Plan(pp=2, cp=2, timeout_s=20)

    def body(world: World) -> list[list[float]]:
        x = torch.tensor([float(world.rank)])
        fabrics = [world.fabrics[name] for name in ("cp", "grads", "pp", "tied")]
        for fabric in fabrics:  # everybody sends on all before anybody receives
            fabric.send(x + 10 * fabrics.index(fabric), 1 - fabric.rank)
        got = [f.recv((1,), torch.float32, 1 - f.rank).tolist() for f in reversed(fabrics)]
        for fabric in fabrics:
            fabric.flush()
        return got

    peers = {"cp": [1, 0, 3, 2], "pp": [2, 3, 0, 1]}
    want = [
        [[peers[name][r] + 10.0 * i] for i, name in ((3, "pp"), (2, "pp"), (1, "cp"), (0, "cp"))]
        for r in range(4)
    ]
    assert run(plan, body) == want


@pytest.mark.dist
def test_two_worlds_in_one_process_are_apart() -> None:
    def child(rank: int) -> list[float]:
        plans = (Plan(cp=2, timeout_s=20), Plan(pp=2, timeout_s=20))
        worlds = [open_world(join(2, timeout_s=20), plan, CPU) for plan in plans]
        first, second = worlds[0].fabrics["cp"], worlds[1].fabrics["pp"]
        first.send(torch.tensor(1.0 + rank), 1 - rank)
        second.send(torch.tensor(11.0 + rank), 1 - rank)
        got = [f.recv((), torch.float32, 1 - rank).item() for f in (second, first)]
        first.flush()
        worlds[0].close()
        second.flush()
        worlds[1].control.all_gather(None, deadline_s=10)
        worlds[1].close()
        return got

    assert run_processes(2, child) == [[12.0, 2.0], [11.0, 1.0]]


@pytest.mark.dist
def test_join_takes_the_default_group_that_is_there_and_leaves_it_whole() -> None:
    def child(rank: int) -> float:
        torch.distributed.init_process_group("gloo")
        world = open_world(join(2, timeout_s=20), Plan(dp=2, timeout_s=20), CPU)
        world.close()
        world.close()
        x = torch.tensor([1.0 + rank])
        torch.distributed.all_reduce(x)
        return x.item()

    assert run_processes(2, child) == [3.0, 3.0]


def test_join_says_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PlanError, match="torchrun --nproc-per-node 4"):
        join(4)


def test_a_plan_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match="4 ranks, found 1"):
        open_world(join(1), Plan(cp=4), CPU)


def test_a_closed_fabric_cannot_be_used() -> None:
    fabric = thread_worlds(Plan(cp=2))[0].fabrics["cp"]
    fabric.close()
    with pytest.raises(ChannelError, match="closed"):
        fabric.all_gather(torch.ones(2))


def test_ranks_count_cp_first_then_dp_then_pp() -> None:
    plan = Plan(pp=2, dp=3, cp=2)
    places = [(c.pp, c.dp, c.cp) for c in (coordinates(plan, r) for r in range(12))]
    assert places == [(p, d, c) for p in range(2) for d in range(3) for c in range(2)]


def test_groups_are_the_rows_and_columns_of_the_plan() -> None:
    assert group_ranks(Plan(pp=3, dp=1, cp=2)) == {
        "cp": [[0, 1], [2, 3], [4, 5]],
        "grads": [[0, 1], [2, 3], [4, 5]],
        "pp": [[0, 2, 4], [1, 3, 5]],
        "tied": [[0, 4], [1, 5]],
    }
    assert group_ranks(Plan(dp=2, cp=2))["grads"] == [[0, 1, 2, 3]]
    assert "tied" not in group_ranks(Plan(dp=2, cp=2))


def test_only_the_end_stages_have_a_tied_fabric() -> None:
    names = [sorted(world.fabrics) for world in thread_worlds(Plan(pp=3))]
    ends = ["cp", "grads", "pp", "tied"]
    assert names == [ends, ["cp", "grads", "pp"], ends]

"""Processes that fail, die, stop, leave or come late: how long the others wait, and what they raise."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from spec_compile.errors import BatchError, ChannelError
from spec_compile.plan import Plan
from spec_compile.runtime.gloo import GlooFabric
from spec_compile.runtime.processes import join, open_world
from spec_compile.runtime.threads import thread_worlds
from spec_compile.runtime.world import World
from tests.ranks import Outcome, process_outcomes, run_processes, run_threads

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
TIMEOUT_S = 2.0
LONG_S = 60.0
PROMPT_S = 1.0


def enter(size: int, timeout_s: float = TIMEOUT_S) -> World:
    plan = Plan(cp=size, timeout_s=timeout_s)
    world = open_world(join(size, timeout_s=timeout_s), plan, CPU)
    world.fabrics["cp"].all_gather(torch.ones(3))  # every connection has been used
    world.control.all_gather(None, deadline_s=10)
    return world


def wait_for_recv(world: World, peer: int) -> None:
    world.fabrics["cp"].recv((5,), torch.float32, peer)


def wait_for_send(world: World, peer: int) -> None:
    world.fabrics["cp"].send(torch.ones(5_000_000), peer)
    world.fabrics["cp"].flush()


def wait_for_all_gather(world: World, peer: int) -> None:
    world.fabrics["cp"].all_gather(torch.ones(5))


def wait_for_entry(world: World, peer: int) -> None:
    world.control.all_gather(None, deadline_s=LONG_S)


WAITS = [wait_for_recv, wait_for_send, wait_for_all_gather, wait_for_entry]


def assert_all_raised(
    outcomes: list[Outcome], ranks: list[int], kind: type[Exception], text: str
) -> None:
    for rank in ranks:
        outcome = outcomes[rank]
        assert type(outcome.error) is kind, f"rank {rank}: {outcome}"
        assert text in str(outcome.error)


@pytest.mark.parametrize("wait", WAITS)
def test_a_failure_word_ends_every_wait_within_a_second(
    wait: Callable[[World, int], None],
) -> None:
    def child(rank: int) -> float:
        world = enter(3, LONG_S)
        if rank == 2:
            time.sleep(0.4)
            began = time.monotonic()
            try:
                raise BatchError("the batch has no documents")
            except BatchError as error:
                world.control.fail(error)
            time.sleep(1.5)
            return began
        with pytest.raises(BatchError, match="no documents") as caught:
            wait(world, 2)
        assert "raised on rank 2" in caught.value.__notes__[0]
        ended = time.monotonic()
        with pytest.raises(BatchError):
            world.fabrics["cp"].all_gather(torch.ones(1))
        with pytest.raises(BatchError):
            world.control.all_gather(None, deadline_s=5)
        assert time.monotonic() - ended < 0.1
        return ended

    ended = run_processes(3, child, timeout=30)
    assert max(ended[:2]) - ended[2] < PROMPT_S


@pytest.mark.parametrize("wait", [wait_for_recv, wait_for_send, wait_for_all_gather])
def test_a_rank_whose_peers_have_closed_their_connections_still_ends_its_own_waits(
    wait: Callable[[World, int], None],
) -> None:
    """Ranks 0 and 3 have closed theirs when rank 1 comes to it, which waits for rank 2."""

    def child(rank: int) -> float:
        world = enter(4, LONG_S)
        if rank == 2:
            time.sleep(0.4)
            began = time.monotonic()
            world.control.fail(BatchError("the batch has no documents"))
            time.sleep(2.0)
            return began
        prompt = GlooFabric._interrupt

        def late(fabric: GlooFabric) -> None:
            time.sleep(0.4)
            prompt(fabric)

        with mock.patch.object(GlooFabric, "_interrupt", late if rank == 1 else prompt):
            with pytest.raises(BatchError, match="no documents"):
                wait(world, 2)
            return time.monotonic()

    ended = run_processes(4, child, timeout=30)
    assert ended[1] - ended[2] < 0.4 + PROMPT_S


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_every_wait_within_a_second_and_is_named(
    victim: int, wait: Callable[[World, int], None]
) -> None:
    killed_at = torch.zeros(1, dtype=torch.float64).share_memory_()

    def child(rank: int) -> None:
        world = enter(3, LONG_S)
        if rank == victim:
            time.sleep(0.4)
            killed_at[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)
        wait(world, victim)

    outcomes = process_outcomes(3, child, timeout=30)
    others = [rank for rank in range(3) if rank != victim]
    assert_all_raised(outcomes, others, ChannelError, f"rank {victim} died")
    assert max(outcomes[r].ended for r in others) - killed_at.item() < PROMPT_S
    assert [o.exitcode for o in outcomes] == [-9 if r == victim else 0 for r in range(3)]


@pytest.mark.parametrize("wait", [wait_for_recv, wait_for_send, wait_for_entry])
def test_a_stopped_rank_ends_every_wait_and_its_own_work_when_it_goes_on(
    wait: Callable[[World, int], None],
) -> None:
    stopped_at = torch.zeros(1, dtype=torch.float64).share_memory_()

    def child(rank: int) -> None:
        world = enter(3)
        if rank == 1:
            stopped_at[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGSTOP)
            wait_for_recv(world, 0)
        wait(world, 1)

    def go_on(pids: list[int]) -> None:
        time.sleep(TIMEOUT_S + 4)
        os.kill(pids[1], signal.SIGCONT)

    outcomes = process_outcomes(3, child, timeout=30, during=go_on)
    assert_all_raised(outcomes, [0, 2], ChannelError, "rank 1 stopped")
    for rank in (0, 2):
        assert outcomes[rank].ended - stopped_at.item() < TIMEOUT_S + 2
    assert type(outcomes[1].error) is ChannelError, outcomes[1]


def test_a_rank_stopped_for_less_than_the_timeout_is_waited_for() -> None:
    def child(rank: int) -> float:
        world = enter(2, 6.0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        total = torch.ones(3)
        world.fabrics["cp"].all_reduce_(total)
        world.control.all_gather(None, deadline_s=10)
        world.close()
        return total.sum().item()

    def go_on(pids: list[int]) -> None:
        time.sleep(2.5)
        os.kill(pids[1], signal.SIGCONT)

    outcomes = process_outcomes(2, child, timeout=30, during=go_on)
    assert [outcome.value for outcome in outcomes] == [6.0, 6.0], outcomes


def test_a_living_rank_that_does_not_come_ends_the_wait_at_the_deadline() -> None:
    def child(rank: int) -> None:
        world = enter(2)
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(ChannelError, match="missed its deadline of 2 s") as caught:
                wait_for_recv(world, 1)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert TIMEOUT_S - 0.1 < time.monotonic() - began < TIMEOUT_S + 2
            began = time.monotonic()
            with pytest.raises(ChannelError, match="cannot be used any more"):
                wait_for_all_gather(world, 1)
            assert time.monotonic() - began < 0.1
        else:
            time.sleep(TIMEOUT_S + 2)
        world.control.all_gather(None, deadline_s=20)

    run_processes(2, child, timeout=30)


@pytest.mark.parametrize("wait", [wait_for_recv, wait_for_send, wait_for_entry])
@pytest.mark.parametrize("closes", [True, False], ids=["close", "exit"])
def test_who_waits_for_a_rank_that_left_is_told_so(
    wait: Callable[[World, int], None], closes: bool
) -> None:
    def child(rank: int) -> None:
        world = enter(3, LONG_S)
        if rank == 1:
            time.sleep(0.3)
            if closes:
                world.close()
                time.sleep(2)
            return
        wait(world, 1)

    began = time.monotonic()
    outcomes = process_outcomes(3, child, timeout=30)
    assert outcomes[1].error is None
    for rank in (0, 2):  # the other one may have ended by then, too
        assert type(outcomes[rank].error) is ChannelError
        assert re.search(r"ranks \[(0, )?1(, 2)?\] closed", str(outcomes[rank].error))
    assert time.monotonic() - began < 6


def test_ranks_that_wait_for_others_go_on_when_one_left() -> None:
    def child(rank: int) -> float:
        world = enter(3, LONG_S)
        pair = world.fabrics["cp"]
        if rank == 2:
            return 0.0
        time.sleep(0.5)
        pair.send(torch.tensor(1.0 + rank), 1 - rank)
        got = pair.recv((), torch.float32, 1 - rank).item()
        pair.flush()
        world.control.check()
        return got

    assert run_processes(3, child, timeout=30) == [2.0, 1.0, 0.0]


def test_an_entry_may_be_later_than_the_timeout() -> None:
    def child(rank: int) -> list[int]:
        world = enter(2)
        if rank == 1:
            time.sleep(TIMEOUT_S + 1.5)
        return world.control.all_gather(rank, deadline_s=20)

    assert run_processes(2, child, timeout=30) == [[0, 1], [0, 1]]


def test_a_forked_child_does_not_keep_its_dead_rank_alive() -> None:
    def child(rank: int) -> None:
        world = enter(2, LONG_S)
        if rank == 1:
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ChannelError, match="rank 1 died"):
            wait_for_recv(world, 1)
        assert time.monotonic() - began < 2

    assert process_outcomes(2, child, timeout=30)[0].error is None


def held() -> int:
    """Threads and open files of this process."""
    return threading.active_count() + len(os.listdir("/proc/self/fd"))


def test_closing_frees_threads_and_files_and_worlds_can_follow_each_other() -> None:
    def child(rank: int) -> None:
        most = 10**9
        for i in range(6):
            world = enter(2)
            world.control.all_gather(None, deadline_s=10)
            world.close()
            end = time.monotonic() + 5
            while i > 1 and held() > most and time.monotonic() < end:
                time.sleep(0.02)  # gloo closes its files a moment later
            if i == 1:  # the first world starts what stays
                time.sleep(0.5)
                most = held()
        assert held() <= most, f"{most} threads and files after two worlds, {held()} after six"

    run_processes(2, child, timeout=60)


def test_a_failure_on_threads_ends_every_wait() -> None:
    worlds = thread_worlds(Plan(cp=3, timeout_s=LONG_S))

    def body(rank: int) -> None:
        if rank == 1:
            time.sleep(0.2)
            worlds[rank].control.fail(ZeroDivisionError("no tokens"))
            return
        wait = wait_for_recv if rank == 0 else wait_for_send
        with pytest.raises(ZeroDivisionError, match="no tokens"):
            wait(worlds[rank], 1)

    run_threads(3, body, timeout=5)


def test_a_deadline_holds_on_threads() -> None:
    fabric = thread_worlds(Plan(cp=2, timeout_s=0.2))[0].fabrics["cp"]
    with pytest.raises(ChannelError, match=r"waited 0.2 s for ranks \[1\]"):
        fabric.recv((3,), torch.float32, 1)
    with pytest.raises(ChannelError, match="cannot be used any more"):
        fabric.all_gather(torch.ones(2))

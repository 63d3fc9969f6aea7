"""One rank dies, stops or leaves: every other one ends with an error that names it, in time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import spec_compile as sc
from spec_compile.runtime.stage_run import StageRun

from .prepared import (
    TIMEOUT_S,
    Prepared,
    Story,
    assert_ended,
    batch_of,
    good_step,
    oracle,
    play,
    policy_loss,
    prepare,
)

pytestmark = pytest.mark.dist

POINTS = ("before", "inside", "between")
PROMPT_S = 5.0
"""A death is known at once, not after ``timeout_s``; the rest is a busy machine."""


SETTLE_S = 0.7


@pytest.fixture(scope="module")
def pipeline() -> Prepared:
    return prepare(sc.Plan(cp=2, pp=2, micro_batches=3, timeout_s=TIMEOUT_S))


@pytest.fixture(scope="module")
def replicas() -> Prepared:
    return prepare(sc.Plan(dp=2, cp=2, timeout_s=TIMEOUT_S))


def story(
    prepared: Prepared,
    odd: int,
    point: str,
    harm: Callable[[], None],
    during: Callable[[list[int]], None] | None = None,
) -> Story:
    """Rank ``odd`` runs ``harm`` before its first step, between two, or inside one; nobody closes."""

    def before(rank: int) -> sc.ParallelModel:
        model = prepared.parallelize()
        if point == "between":
            model.step(batch_of(model.dp_rank), policy_loss)
        return model

    def fault(rank: int, model: sc.ParallelModel) -> None:
        batch = batch_of(model.dp_rank)
        if rank != odd:
            model.step(batch, policy_loss)
        elif point != "inside":
            if point == "between":
                time.sleep(SETTLE_S)  # a peer that is ahead ends the step that others still finish
            harm()
            model.step(batch, policy_loss)
        elif prepared.plan.pp == 1:
            model.step(batch, harmful_loss(harm))
        else:
            with harmful_forward(harm):
                model.step(batch, policy_loss)

    return Story(before, fault, during)


def harmful_loss(harm: Callable[[], None]) -> Callable[[sc.TokenOutputs], Any]:
    def loss(rows: sc.TokenOutputs) -> Any:
        harm()
        return policy_loss(rows)

    return loss


def harmful_forward(harm: Callable[[], None]) -> Any:
    """Do harm after the forward of the second micro-batch, on any stage."""
    forward = StageRun.forward

    def harmful(self: StageRun, mb: int, hidden: Tensor | None) -> Tensor | None:
        output = forward(self, mb, hidden)
        if mb == 1:
            harm()
        return output

    return mock.patch.object(StageRun, "forward", harmful)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def matrix(quick: set[tuple[int, str]], *, ranks: int = 4) -> list[Any]:
    """Every rank at every point; all but the ``quick`` ones are slow tests."""
    return [
        pytest.param(odd, point, marks=() if (odd, point) in quick else pytest.mark.slow)
        for odd in range(ranks)
        for point in POINTS
    ]


QUICK_KILLS = {(0, "before"), (1, "inside"), (2, "inside"), (3, "between")}


@pytest.mark.parametrize(("odd", "point"), matrix(QUICK_KILLS))
def test_a_killed_rank_of_a_pipeline_ends_all_others(
    pipeline: Prepared, odd: int, point: str
) -> None:
    check_killed(play(story(pipeline, odd, point, kill)), odd)


@pytest.mark.parametrize(("odd", "point"), matrix({(0, "inside"), (0, "between")}))
def test_a_killed_replica_ends_all_others(replicas: Prepared, odd: int, point: str) -> None:
    check_killed(play(story(replicas, odd, point, kill)), odd)


def check_killed(ends: list[Any], odd: int) -> None:
    assert ends[odd].outcome.exitcode == -signal.SIGKILL
    for end in ends[:odd] + ends[odd + 1 :]:
        assert_ended(end, sc.ChannelError, f"rank {odd} died", within_s=PROMPT_S)


QUICK_STOPS = {(0, "inside"), (3, "before")}


@pytest.mark.parametrize(("odd", "point"), matrix(QUICK_STOPS))
def test_a_stopped_rank_ends_all_others_and_raises_itself_when_it_goes_on(
    pipeline: Prepared, odd: int, point: str
) -> None:
    check_stopped(play(story(pipeline, odd, point, stop, continuing(odd, TIMEOUT_S + 3))), odd)


@pytest.mark.parametrize(("odd", "point"), matrix(set()))
def test_a_stopped_replica_ends_all_others_and_raises_itself_when_it_goes_on(
    replicas: Prepared, odd: int, point: str
) -> None:
    check_stopped(play(story(replicas, odd, point, stop, continuing(odd, TIMEOUT_S + 3))), odd)


def check_stopped(ends: list[Any], odd: int) -> None:
    for rank, end in enumerate(ends):
        culprit = f"rank {odd}" if rank != odd else "stopped"
        assert_ended(end, sc.ChannelError, culprit)


def continuing(odd: int, after_s: float) -> Callable[[list[int]], None]:
    """Let the rank go on ``after_s`` seconds after it stopped."""

    def during(pids: list[int]) -> None:
        while _state(pids[odd]) != "T":
            time.sleep(0.02)
        time.sleep(after_s)
        os.kill(pids[odd], signal.SIGCONT)

    return during


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]


@pytest.mark.parametrize("point", ["before", pytest.param("inside", marks=pytest.mark.slow)])
def test_a_rank_that_stops_for_less_than_the_timeout_harms_nobody(
    pipeline: Prepared, point: str
) -> None:
    expected = oracle(pipeline)

    def before(rank: int) -> sc.ParallelModel:
        return pipeline.parallelize()

    def fault(rank: int, model: sc.ParallelModel) -> None:
        if rank == 1 and point == "before":
            stop()
        with harmful_forward(stop if rank == 1 and point == "inside" else lambda: None):
            good_step(model, expected)

    for end in play(Story(before, fault, continuing(1, TIMEOUT_S / 2))):
        assert end.error is None, end.outcome.text


def test_a_peer_that_comes_late_but_lives_is_waited_for(pipeline: Prepared) -> None:
    expected = oracle(pipeline)

    def before(rank: int) -> sc.ParallelModel:
        return pipeline.parallelize()

    def fault(rank: int, model: sc.ParallelModel) -> None:
        if rank == 2:
            time.sleep(TIMEOUT_S + 2)
        good_step(model, expected)
        model.close()

    for end in play(Story(before, fault)):
        assert end.error is None, end.outcome.text


@pytest.mark.parametrize("odd", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("close", [False, True], ids=["leaves", "closes"])
def test_a_rank_that_ends_normally_while_others_step_ends_them(
    pipeline: Prepared, odd: int, close: bool
) -> None:
    def before(rank: int) -> sc.ParallelModel:
        model = pipeline.parallelize()
        model.step(batch_of(0), policy_loss)
        return model

    def fault(rank: int, model: sc.ParallelModel) -> None:
        if rank != odd:
            model.step(batch_of(0), policy_loss)
        elif close:
            model.close()

    ends = play(Story(before, fault))
    assert ends[odd].error is None
    for end in ends[:odd] + ends[odd + 1 :]:
        assert_ended(end, sc.ChannelError, f"[{odd}] closed their model", within_s=PROMPT_S)


@pytest.mark.parametrize("odd", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_raises_between_two_steps_and_leaves_ends_the_others(
    pipeline: Prepared, odd: int
) -> None:
    def harm() -> None:
        raise ZeroDivisionError("in the training loop")

    ends = play(story(pipeline, odd, "between", harm))
    assert isinstance(ends[odd].error, ZeroDivisionError)
    for end in ends[:odd] + ends[odd + 1 :]:
        assert_ended(end, sc.ChannelError, f"[{odd}] closed their model", within_s=PROMPT_S)


@pytest.mark.parametrize("odd", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("how", ["interrupt", "exit"])
def test_a_rank_that_is_interrupted_inside_a_step_ends_the_others(
    pipeline: Prepared, odd: int, how: str
) -> None:
    """Ctrl-C reaches only one rank; sys.exit in a policy loss is the same."""

    def harm() -> None:
        if how == "exit":
            sys.exit("enough")
        os.kill(os.getpid(), signal.SIGINT)

    ends = play(story(pipeline, odd, "inside", harm))
    kind = SystemExit if how == "exit" else KeyboardInterrupt
    assert isinstance(ends[odd].error, kind), ends[odd].outcome.text
    for end in ends[:odd] + ends[odd + 1 :]:
        assert_ended(end, sc.ChannelError, f"rank {odd}", within_s=PROMPT_S)
        assert kind.__name__ in end.text


def test_an_error_inside_the_step_reaches_all_ranks_with_its_traceback(pipeline: Prepared) -> None:
    def out_of_memory() -> None:
        raise MemoryError("no room for activations")

    for rank, end in enumerate(play(story(pipeline, 1, "inside", out_of_memory))):
        assert_ended(end, MemoryError, "no room for activations", within_s=PROMPT_S)
        assert "out_of_memory" in (end.outcome.text if rank == 1 else end.text)


def test_a_call_after_a_failure_raises_it_again_at_once(pipeline: Prepared) -> None:
    def before(rank: int) -> sc.ParallelModel:
        return pipeline.parallelize()

    def fault(rank: int, model: sc.ParallelModel) -> None:
        if rank == 3:
            kill()
        with pytest.raises(sc.ChannelError, match="rank 3 died"):
            model.step(batch_of(0), policy_loss)
        assert all(p.grad is None for group in model.param_groups() for p in group["params"])
        started = time.monotonic()
        with pytest.raises(sc.ChannelError, match="rank 3 died"):
            model.logprobs(batch_of(0))
        assert time.monotonic() - started < 1.0
        model.close()

    for end in play(Story(before, fault))[:3]:
        assert end.error is None, end.outcome.text

"""Random faults in taps and ranks: nothing hangs, no wrong value passes, the error names the culprit."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from typing import Any

import pytest

import spec_compile as sc
from tests.oracle import DenseResult

from .prepared import Prepared, Story, good_step, oracle, play, prepare
from .random_faults import CHECKS, MICRO_BATCHES, SETUP_TIMEOUT_S, draw, inject

pytestmark = pytest.mark.dist

QUICK, ALL = 20, 200
WORKERS = 3
"""Processes with torch imported and the step lowered, from which faulty worlds are forked."""
RESTARTS = 10
"""After this many faults a healthy world must start and be right."""


@pytest.fixture(scope="module")
def pipeline() -> Prepared:
    return prepare(sc.Plan(pp=2, micro_batches=MICRO_BATCHES, timeout_s=SETUP_TIMEOUT_S))


@pytest.fixture(scope="module")
def expected(pipeline: Prepared) -> DenseResult:
    return oracle(pipeline)


def restart(prepared: Prepared, expected: DenseResult) -> None:
    """A healthy world on the same machine, right after a faulty one."""

    def fault(rank: int, model: sc.ParallelModel) -> None:
        good_step(model, expected)
        model.close()

    for end in play(Story(lambda rank: prepared.parallelize(), fault), world_size=2):
        assert end.error is None, end.outcome.text


def inject_all(seeds: Sequence[int], prepared: Prepared, expected: DenseResult) -> list[str]:
    """Inject one fault a seed; return what was wrong."""
    wrong = []
    for i, seed in enumerate(seeds):
        try:
            inject(draw(seed), prepared, expected)
            if i % RESTARTS == RESTARTS - 1:
                restart(prepared, expected)
        except (Exception, pytest.fail.Exception):  # the other faults are worth seeing too
            wrong.append(f"{draw(seed)}\n{traceback.format_exc()}")
    return wrong


def test_every_kind_of_fault_is_among_the_quick_ones() -> None:
    assert {draw(seed).kind for seed in range(QUICK)} == set(CHECKS)


@pytest.mark.timeout(300)
def test_twenty_random_faults(pipeline: Prepared, expected: DenseResult) -> None:
    wrong = in_workers(range(QUICK), pipeline, expected)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_random_faults(pipeline: Prepared, expected: DenseResult) -> None:
    wrong = in_workers(range(QUICK, QUICK + ALL), pipeline, expected)
    assert not wrong, "\n\n".join(wrong)


def in_workers(seeds: Sequence[int], prepared: Prepared, expected: DenseResult) -> list[str]:
    """Deal the seeds to processes forked from this one; most of a fault's time is waiting."""
    fork = multiprocessing.get_context("fork")
    results: Any = fork.Queue()

    def work(mine: Sequence[int]) -> None:
        results.put(inject_all(mine, prepared, expected))

    workers = [
        fork.Process(target=work, args=(seeds[i::WORKERS],), daemon=False) for i in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    wrong = [text for _ in workers for text in results.get(timeout=800)]
    for worker in workers:
        worker.join(30)
    return wrong

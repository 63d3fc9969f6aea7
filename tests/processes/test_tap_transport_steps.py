"""Steps whose taps travel by each transport between processes: equal to the dense step, flat in memory."""

from __future__ import annotations

import dataclasses
import threading

import pytest

import spec_compile as sc
from tests.ranks import run_processes

from .footprint import Samples
from .prepared import Prepared, batch_of, good_step, oracle, policy_loss, prepare

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def pipeline() -> Prepared:
    return prepare(sc.Plan(pp=2, micro_batches=3, timeout_s=30.0))


def over(prepared: Prepared, transport: str) -> Prepared:
    """The same step with another transport: the graphs do not depend on it."""
    plan = dataclasses.replace(prepared.plan, tap_transport=transport)
    lowered = dataclasses.replace(prepared.lowered, plan=plan)
    return dataclasses.replace(prepared, plan=plan, lowered=lowered)


@pytest.mark.parametrize("transport", ["c10d", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_step_equals_the_dense_step(pipeline: Prepared, transport: str) -> None:
    expected, chosen = oracle(pipeline), over(pipeline, transport)

    def body(rank: int) -> tuple[set[str], int]:
        model = chosen.parallelize()
        for _ in range(2):
            good_step(model, expected)
        model.logprobs(batch_of(0))
        model.evaluate(batch_of(0))
        taps = model._caller.taps
        assert taps is not None
        model.close()
        return set(taps.agreed.transports.values()), len(model._caller.tap_speeds)

    assert run_processes(2, body, timeout=100) == [({transport}, 1)] * 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_a_thousand_steps_leave_memory_handles_and_threads_flat(transport: str) -> None:
    chosen = over(prepare(sc.Plan(pp=2, micro_batches=2, timeout_s=30.0)), transport)
    batch, steps = batch_of(0), 1000

    def body(rank: int) -> tuple[Samples, int]:
        model, seen = chosen.parallelize(), Samples()
        for step in range(1, steps + 1):
            model.step(batch, policy_loss)
            if step % 50 == 0:
                seen.take()
        threads = threading.active_count()
        model.close()
        return seen, threads

    for seen, threads in run_processes(2, body, timeout=880):
        seen.check(warm=3)
        assert threads == 2

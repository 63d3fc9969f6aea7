"""`parallelize` on real processes over gloo, from the first step to the checkpoint."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import spec_compile as sc
from tests.models import gated_draft, randomise, tiny_llama
from tests.ranks import run_processes

from .prepared import (
    TOLERANCE,
    Prepared,
    assert_step_equals,
    batch_of,
    good_step,
    oracle,
    owned_grads,
    policy_loss,
    prepare,
)

pytestmark = pytest.mark.dist

PIPELINE = sc.Plan(cp=2, pp=2, micro_batches=3, timeout_s=20.0)
STAGES = dataclasses.replace(PIPELINE, schedule="zero_bubble", recompute="layers")
REPLICAS = sc.Plan(dp=2, cp=2, micro_batches=2, timeout_s=20.0)


@pytest.fixture(scope="module")
def pipeline() -> Prepared:
    return prepare(PIPELINE)


@pytest.fixture(scope="module")
def stages() -> Prepared:
    return prepare(STAGES, tied=True)


@pytest.fixture(scope="module")
def tied() -> Prepared:
    return prepare(PIPELINE, tied=True)


@pytest.fixture(scope="module")
def replicas() -> Prepared:
    return prepare(REPLICAS)


@pytest.mark.parametrize("name", ["pipeline", "stages", "tied", "replicas"])
def test_a_step_on_four_processes_equals_the_dense_step(
    name: str, request: pytest.FixtureRequest
) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    expected = oracle(prepared)

    def body(rank: int) -> tuple[sc.StepResult, dict[str, Tensor]]:
        model = prepared.parallelize()
        result = model.step(batch_of(model.dp_rank), policy_loss)
        grads = owned_grads(model)
        model.close()
        return result, grads

    found = run_processes(4, body)
    for result, grads in found:
        assert_step_equals(result, grads, expected)
        assert result == found[0][0]
    owned = set().union(*(grads for _, grads in found))
    assert owned == {
        *(f"policy.{n}" for n in expected.policy_grads),
        *(f"draft.{n}" for n in expected.draft_grads),
    }


@pytest.mark.parametrize("name", ["pipeline", "stages", "replicas"])
def test_log_probs_and_evaluation_are_the_same_on_every_rank(
    name: str, request: pytest.FixtureRequest
) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    expected = oracle(prepared)

    def body(rank: int) -> tuple[int, Tensor, Any]:
        model = prepared.parallelize()
        batch = batch_of(model.dp_rank)
        return model.dp_rank, model.logprobs(batch), model.evaluate(batch)

    for dp_rank, logprobs, evaluation in run_processes(4, body):
        torch.testing.assert_close(
            logprobs, expected.logprobs[dp_rank], rtol=TOLERANCE, atol=TOLERANCE
        )
        assert evaluation.draft_loss == pytest.approx(expected.draft_loss, rel=TOLERANCE)


def test_taps_between_processes_go_through_shared_memory_that_leaves_no_name(
    pipeline: Prepared,
) -> None:
    def body(rank: int) -> tuple[set[str], int, list[str]]:
        model = pipeline.parallelize()
        taps = model._caller.taps
        assert taps is not None
        model.step(batch_of(0), policy_loss)  # grows the rings
        names = [path.name for path in Path("/dev/shm").glob("spec_compile_*")]
        return set(taps.agreed.transports.values()), os.getpid(), names

    found = run_processes(4, body)
    assert all(transports == {"shm"} for transports, _, _ in found)
    for _, pid, _ in found:  # other tests run beside this one, with names of their own
        assert not [
            n for _, _, names in found for n in names if n.startswith(f"spec_compile_{pid}_")
        ]


def test_exported_weights_are_the_whole_checkpoint_on_every_rank(tied: Prepared) -> None:
    wanted = {
        "policy": dict(tied.target.state_dict()),
        "draft": dict(tied.draft.state_dict()) if tied.draft is not None else {},
    }

    def body(rank: int) -> None:
        model = tied.parallelize()
        for which, expected in wanted.items():
            found = dict(model.export_weights(which))
            assert list(found) == list(expected)
            for name, value in found.items():
                assert torch.equal(value, expected[name]), name
        half = dict(model.export_weights("draft", dtype=torch.bfloat16))
        assert {value.dtype for value in half.values()} == {torch.bfloat16}

    run_processes(4, body)


def test_a_distributed_checkpoint_loads_on_four_ranks_and_in_one_process(
    tied: Prepared, tmp_path: Path
) -> None:
    def trained(rank: int) -> list[float]:
        model = tied.parallelize()
        optimizer = torch.optim.SGD(model.param_groups(policy={"lr": 0.1}, draft={"lr": 0.1}))
        model.step(batch_of(0), policy_loss)
        optimizer.step()
        optimizer.zero_grad()
        save(model.state_dict(), checkpoint_id=tmp_path / "checkpoint")
        return _two_losses(model)

    def resumed(rank: int) -> list[float]:
        _scramble(tied)
        model = tied.parallelize()
        _load(model, tmp_path / "checkpoint")
        return _two_losses(model)

    expected = run_processes(4, trained)
    assert run_processes(4, resumed) == expected

    target = tiny_llama(dtype=torch.float32, tied=True, seed=5)
    alone = sc.parallelize(target, gated_draft(target, seed=6), sc.Plan(micro_batches=3))
    _load(alone, tmp_path / "checkpoint")
    save(alone.state_dict(), checkpoint_id=tmp_path / "of one rank")
    assert _two_losses(alone) == pytest.approx(expected[0], rel=TOLERANCE)

    def spread(rank: int) -> list[float]:
        model = tied.parallelize()
        _load(model, tmp_path / "of one rank")
        return _two_losses(model)

    assert run_processes(4, spread)[0] == pytest.approx(expected[0], rel=TOLERANCE)


def _two_losses(model: sc.ParallelModel) -> list[float]:
    result = model.step(batch_of(0, seed=1), policy_loss)
    return [result.policy_loss, result.draft_loss]


def _scramble(prepared: Prepared) -> None:
    for module in (prepared.target, prepared.draft):
        if module is not None:
            randomise(module, seed=77)


def _load(model: sc.ParallelModel, path: Path) -> None:
    state = model.state_dict()
    fresh = {name: torch.zeros_like(value) for name, value in state.items()}
    load(fresh, checkpoint_id=path)
    model.load_state_dict(fresh)


def test_two_models_live_and_a_third_follows_in_one_process(
    pipeline: Prepared, replicas: Prepared
) -> None:
    """Pipeline stages give up weights, so each model has modules of its own."""
    third = prepare(sc.Plan(cp=4, timeout_s=20.0))
    expected = {id(p): oracle(p) for p in (pipeline, replicas, third)}

    def body(rank: int) -> None:
        first, second = pipeline.parallelize(), replicas.parallelize()
        for _ in range(2):
            good_step(first, expected[id(pipeline)])
            good_step(second, expected[id(replicas)])
        first.close()
        good_step(second, expected[id(replicas)])
        last = third.parallelize()
        second.close()
        good_step(last, expected[id(third)])
        last.close()
        last.close()
        with pytest.raises(sc.ConfigError, match="closed"):
            last.step(batch_of(0), policy_loss)
        assert torch.distributed.is_initialized()
        torch.distributed.barrier()

    run_processes(4, body)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hundred_steps_keep_memory_handles_and_threads(pipeline: Prepared) -> None:
    def body(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        model = pipeline.parallelize()
        for _ in range(20):
            model.step(batch_of(0), policy_loss)
        first = resources()
        for _ in range(180):
            model.step(batch_of(0), policy_loss)
        return first, resources()

    for first, last in run_processes(4, body, timeout=280.0):
        assert last["handles"] == first["handles"]
        assert last["threads"] == first["threads"]
        assert last["kilobytes"] < first["kilobytes"] + 8 * 1024


def resources() -> dict[str, int]:
    """Open handles, threads and resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return {
        "handles": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(fields["Threads"]),
        "kilobytes": int(fields["VmRSS"].split()[0]),
    }

"""Several processes on one GPU, or on as many as there are."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

import spec_compile as sc
from spec_compile.errors import ChannelError
from tests.ranks import process_outcomes, run_processes

from .gpu_cases import (
    Step,
    collectives,
    die,
    many_steps,
    push_taps,
    reuse_memory,
    ring,
    stuck,
    train,
)

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.timeout(300)]
FABRICS = ("cuda_ipc", "nccl")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
ONE = sc.Plan(micro_batches=2, timeout_s=60.0)


@pytest.fixture(scope="module")
def alone() -> Step:
    return run_processes(1, partial(train, ONE), timeout=200, method="spawn")[0]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_equal_their_definitions(size: int) -> None:
    run_processes(size, partial(collectives, "cuda_ipc", size), timeout=100, method="spawn")


@TWO_GPUS
def test_collectives_over_nccl_equal_their_definitions() -> None:
    run_processes(2, partial(collectives, "nccl", 2), timeout=100, method="spawn")


@TWO_GPUS
def test_a_ring_gives_the_same_bits_over_nccl_and_over_cuda_ipc() -> None:
    found = [run_processes(2, partial(ring, kind), timeout=120, method="spawn") for kind in FABRICS]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"cp": 2, "cp_strategy": "ring"},
        {"cp": 2, "cp_strategy": "all_gather"},
        {"pp": 2},
        {"cp": 2, "pp": 2, "schedule": "zero_bubble"},
    ],
    ids=str,
)
def test_a_step_equals_that_of_one_process(sizes: dict[str, object], alone: Step) -> None:
    plan = dataclasses.replace(ONE, **sizes)  # type: ignore[arg-type]
    found = run_processes(plan.world_size, partial(train, plan), timeout=250, method="spawn")
    seen: set[str] = set()
    for step in found:
        torch.testing.assert_close(step.losses, alone.losses, rtol=1e-4, atol=1e-4)
        for name, grad in step.grads.items():
            error = (grad - alone.grads[name]).norm() / alone.grads[name].norm().clamp_min(1e-6)
            assert error < 2e-3, f"{name}: {error}"
        seen |= step.grads.keys()
    assert seen == alone.grads.keys()


def test_the_draft_loss_behind_a_channel_is_bitwise_that_of_one_process(alone: Step) -> None:
    plan = dataclasses.replace(ONE, pp=2)
    for step in run_processes(2, partial(train, plan), timeout=250, method="spawn"):
        assert [draft for _, draft in step.losses] == [draft for _, draft in alone.losses]


@pytest.mark.parametrize("expandable", [False, True])
def test_a54_taps_arrive_bit_by_bit_whatever_the_allocator(
    expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots come from the driver: expandable segments have no handle that a peer could map."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    run_processes(2, partial(push_taps, "cuda_ipc"), timeout=100, method="spawn")


@pytest.mark.nixl
def test_taps_arrive_bit_by_bit_from_gpu_memory_to_gpu_memory_over_nixl() -> None:
    run_processes(2, partial(push_taps, "nixl"), timeout=100, method="spawn")


def test_a59_a_pushed_value_whose_memory_is_used_again_arrives_as_it_was() -> None:
    run_processes(2, reuse_memory, timeout=100, method="spawn")


def test_a_killed_rank_ends_all_others_in_a_channel_error() -> None:
    plan = sc.Plan(cp=2, pp=2, micro_batches=2, timeout_s=10.0)
    outcomes = process_outcomes(4, partial(die, plan), timeout=250, method="spawn")
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, ChannelError), outcome
        assert "rank 3 died" in str(outcome.error)
        assert outcome.exitcode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_steps_leave_device_host_and_handles_flat() -> None:
    """All ranks may share a GPU, so what is in use there counts for all of them."""
    plan = sc.Plan(pp=2, micro_batches=2, timeout_s=60.0)
    body = partial(many_steps, plan, 1000)
    for seen in run_processes(2, body, timeout=580, method="spawn"):
        seen.check(warm=4, host_kib=16384, device_kib=16384)


def test_a_device_that_waits_for_a_dead_peer_goes_on_to_the_error() -> None:
    first = process_outcomes(2, stuck, timeout=60, method="spawn")[0]
    assert isinstance(first.error, ChannelError), first
    assert "rank 1 died" in str(first.error)

"""Which fabric serves a group."""

from __future__ import annotations

import pytest

from spec_compile.errors import PlanError
from spec_compile.plan import Plan
from spec_compile.runtime.fabric_choice import Seat, choose_fabrics

PLAN = Plan(cp=2, pp=2)


def seats(hosts: str, gpus: str) -> list[Seat]:
    """One seat a letter."""
    return [Seat(host, "cuda", gpu) for host, gpu in zip(hosts, gpus, strict=True)]


@pytest.mark.parametrize("gpus", ["0000", "0123"])
def test_gpus_of_one_host_share_memory_however_many_there_are(gpus: str) -> None:
    chosen = choose_fabrics(PLAN, seats("aaaa", gpus))
    assert chosen == dict.fromkeys(("cp", "grads", "pp", "tied"), "cuda_ipc")


def test_only_groups_across_hosts_take_nccl() -> None:
    chosen = choose_fabrics(PLAN, seats("aabb", "0101"))
    assert chosen == {"cp": "cuda_ipc", "grads": "cuda_ipc", "pp": "nccl", "tied": "nccl"}


def test_gpus_that_cannot_map_each_other_take_nccl() -> None:
    assert set(choose_fabrics(PLAN, seats("aaaa", "0123"), shares=False).values()) == {"nccl"}


def test_ranks_on_one_gpu_are_refused_where_only_nccl_is_left() -> None:
    with pytest.raises(PlanError, match="several ranks on one GPU, which NCCL refuses"):
        choose_fabrics(PLAN, seats("aaaa", "0000"), shares=False)


def test_cpus_take_gloo_and_groups_of_one_take_nothing() -> None:
    assert choose_fabrics(Plan(dp=2), [Seat("a", "cpu")] * 2) == {"grads": "gloo"}


def test_devices_of_two_types_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"devices of one type, cpu or cuda, found \['cpu', 'cuda'\]"
    ):
        choose_fabrics(Plan(cp=2), [Seat("a", "cpu"), Seat("a", "cuda", "0")])

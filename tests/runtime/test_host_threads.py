"""Threads of a host's ranks against its cores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_compile.runtime import host_threads
from spec_compile.runtime.host_threads import crowded, own_threads
from spec_compile.runtime.processes import INTRODUCTION_BYTES


def entry(host: str, threads: int, cores: int = 0xFFFF, at_a_time: int = 0) -> dict[str, Any]:
    return {"host": host, "threads": threads, "cores": hex(cores), "at_a_time": at_a_time}


def test_ranks_with_more_threads_than_cores_are_told_once_a_host() -> None:
    ranks = [entry("a", 16), entry("b", 16), entry("a", 16), entry("b", 16)]
    said = [crowded(rank, ranks) for rank in range(4)]
    assert said[2:] == [None, None]
    for text in said[:2]:
        assert text is not None
        for part in ("32 threads", "16 cores", "OMP_NUM_THREADS=8"):
            assert part in text


def test_threads_that_have_a_core_each_are_no_crowd() -> None:
    assert crowded(0, [entry("a", 8), entry("a", 8)]) is None
    assert crowded(0, [entry("a", 16), entry("b", 16)]) is None
    assert crowded(0, [entry("a", 8, 0x00FF), entry("a", 8, 0xFF00)]) is None


def test_a_core_a_rank_leaves_one_number_of_threads_to_advise() -> None:
    text = crowded(0, [entry("a", 2, 0b11)] * 2)
    assert text is not None
    assert text.endswith("set OMP_NUM_THREADS=1, as torchrun does")


def test_more_ranks_than_cores_with_one_thread_each_are_as_torchrun_starts_them() -> None:
    assert crowded(0, [entry("a", 1, 0b11)] * 4) is None


def test_a_process_knows_its_threads_and_cores() -> None:
    own = own_threads()
    assert own["threads"] == torch.get_num_threads()
    assert int(own["cores"], 16).bit_count() >= 1


def test_an_entry_of_the_largest_host_that_linux_knows_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8192))
    own = {"host": "h" * 64 + "b" * 37, "address": "f" * 45, **own_threads()}
    assert int(own["cores"], 16).bit_count() == 8192
    assert len(json.dumps(own)) <= INTRODUCTION_BYTES


def test_without_affinity_all_cores_of_the_host_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert own_threads()["cores"] == "0x1"
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert own_threads()["cores"] == "0xfff"


def test_a_container_has_the_cores_of_its_quota() -> None:
    text = crowded(0, [entry("a", 16, (1 << 192) - 1, at_a_time=16)] * 2)
    assert text is not None
    assert "on 16 cores" in text


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", 0), ("1550000 100000", 16), ("50000 100000", 1), ("", 0)]
)
def test_a_quota_is_read_in_cores(
    text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_threads, "QUOTA", tmp_path / "cpu.max")
    assert own_threads()["at_a_time"] == 0
    (tmp_path / "cpu.max").write_text(text)
    assert own_threads()["at_a_time"] == expected

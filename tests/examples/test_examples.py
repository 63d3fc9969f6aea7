"""Every example runs, and does what its text says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import spec_compile as sc
from examples import hand_loop, own_draft
from examples.demo.__main__ import main as demo
from examples.demo.processes import run_ranks
from examples.demo.task import Questions, Workload
from tests.models import tiny_llama
from tests.ranks import run_processes

ROOT = Path(__file__).resolve().parents[2]
SLEEPERS = """
import os, time
from examples.demo.processes import run_ranks
def body(rank):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)
run_ranks(2, body)
"""


def tiny_workload() -> Workload:
    target = tiny_llama(tied=True, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def questions(count: int) -> Questions:
        ids = [
            torch.randint(0, 53, (n,), generator=generator).tolist() for n in range(4, 4 + count)
        ]
        return Questions(ids, {"wanted": [row[0] for row in ids]})

    return Workload(
        target=target,
        draft=sc.drafts.Eagle3.from_target(target, ttt_length=2),
        train=questions(4),
        held_out=questions(2),
        reward=_even,
        group_size=4,
        max_tokens=8,
        policy_lr=1e-3,
    )


def _even(prompts: Any, completions: Any, *, wanted: list[int], **columns: Any) -> list[float]:
    return [float(sum(ids) % 2 == 0) for ids in completions]


def test_loss_of_own_draft_falls() -> None:
    losses = own_draft.main(steps=15)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("own_loss", [pytest.param(False, marks=pytest.mark.slow), True])
def test_resumed_hand_loop_repeats_the_next_step(tmp_path: Path, own_loss: bool) -> None:
    _, following, again = hand_loop.main(tmp_path, steps=2, own_loss=own_loss)
    assert again == following


@pytest.mark.slow
@pytest.mark.dist
def test_hand_loop_on_four_processes_equals_one(tmp_path: Path) -> None:
    alone, _, _ = hand_loop.main(tmp_path, steps=3)

    def body(rank: int) -> Any:
        return hand_loop.main(tmp_path, steps=3, cp=2, pp=2)

    for losses, following, again in run_processes(4, body, timeout=100):
        assert losses == [pytest.approx(pair, rel=1e-4) for pair in alone]
        assert again == following


@pytest.mark.dist
@pytest.mark.parametrize(
    "sizes", [("2", "2", "1"), pytest.param(("1", "2", "2"), marks=pytest.mark.slow)]
)
def test_demo_proves_trains_and_saves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sizes: tuple[str, str, str]
) -> None:
    cp, pp, dp = sizes
    arguments = ["--cp", cp, "--pp", pp, "--dp", dp, "--warm-up", "8", "--steps", "2"]
    assert demo(arguments, tiny_workload, tmp_path) == 0
    printed = capfd.readouterr().out
    assert "exactly 1 at unchanged weights: smallest 1.0, largest 1.0" in printed
    assert "NO " not in printed
    for file, moved in (("metrics.jsonl", True), ("metrics-frozen.jsonl", False)):
        steps = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert [one["step"] for one in steps] == [1, 2]
        assert (steps[-1]["draft_loss"] > 0) == moved
    assert (tmp_path / "graph.html").stat().st_size > 0
    fresh = dict(tiny_workload().draft.named_parameters())
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert saved.keys() == fresh.keys()
    assert not torch.equal(saved["fc.weight"], fresh["fc.weight"])


@pytest.mark.dist
def test_demo_fails_when_plain_numbers_differ(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo(
            ["--cp", "1", "--pp", "1", "--steps", "1"], _differs_after_the_first(tmp_path), tmp_path
        )
    printed = capfd.readouterr().out
    assert "NO   draft loss" in printed
    assert "NO   policy" not in printed


def _differs_after_the_first(folder: Path) -> Callable[[], Workload]:
    def make() -> Workload:
        work = tiny_workload()
        if (folder / "plain.json").exists():
            with torch.no_grad():
                work.draft.lm_head.weight.mul_(1.1)
        return work

    return make


@pytest.mark.dist
def test_failed_rank_ends_the_others() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            raise SystemExit(3)
        time.sleep(100)

    start = time.monotonic()
    with pytest.raises(SystemExit, match="1: 3"):
        run_ranks(2, body, grace_s=0.5)
    assert time.monotonic() - start < 30


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_demo_ends_all_its_processes(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SLEEPERS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        process.wait(20)
    deadline = time.monotonic() + 10
    while any(_alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [rank for rank in ranks if _alive(rank)]


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

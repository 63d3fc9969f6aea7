"""Interpreters of their own: under torchrun, and each ending by itself after a fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import spec_compile as sc
from tests.models import gated_draft, tiny_llama
from tests.oracle import dense_step
from tests.ranks import free_port

from .prepared import TOLERANCE, batch_of, policy_loss

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("script.py")
LIMIT_S = 200.0
NOBODY = "-1"


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


@pytest.mark.slow
def test_a_script_under_torchrun_trains_and_ends_without_close(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, "--standalone", str(SCRIPT), str(tmp_path), NOBODY],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert all(losses == found[0] for losses in found)

    target = tiny_llama(layers=2, dtype=torch.float32)
    draft = gated_draft(target, taps=(1, 0), steps=2)
    for policy, trained, policy_norm, draft_norm in found[0]:
        dense = dense_step(target, draft, batch_of(0), policy_loss)
        wanted = [dense.policy_loss, dense.draft_loss]
        for module, grads in ((target, dense.policy_grads), (draft, dense.draft_grads)):
            norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            wanted.append(float(norm))
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter -= 0.05 * grads[name] / norm.clamp_min(1.0)
        assert [policy, trained, policy_norm, draft_norm] == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("deadly", [0, 3])
def test_interpreters_end_by_themselves_when_a_peer_is_killed(tmp_path: Path, deadly: int) -> None:
    """Without torchrun, whose agent would kill the others."""
    world = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(deadly)],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **world),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        assert processes[deadly].wait(LIMIT_S) == -signal.SIGKILL
        killed = time.monotonic()
        for rank, process in enumerate(processes):
            if rank != deadly:
                _, text = process.communicate(timeout=30)
                assert process.returncode == 1
                assert f"{sc.ChannelError.__name__}: rank {deadly} died" in text
        assert time.monotonic() - killed < 15
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()

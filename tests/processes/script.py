"""A training script as people write it: started by torchrun, two steps, no close at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import spec_compile as sc
from tests.models import gated_draft, tiny_llama
from tests.processes.prepared import batch_of, policy_loss


def main(folder: Path, deadly_rank: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    target = tiny_llama(layers=2, dtype=torch.float32)
    draft = gated_draft(target, taps=(1, 0), steps=2)
    plan = sc.Plan(cp=2, pp=2, micro_batches=2, timeout_s=10.0, verify=False)
    model = sc.parallelize(target, draft, plan)
    optimizer = torch.optim.SGD(model.param_groups(policy={"lr": 0.05}, draft={"lr": 0.05}))
    losses = []
    for step in range(2):
        if step == 1 and rank == deadly_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        result = model.step(batch_of(model.dp_rank), policy_loss)
        norms = model.clip_grad_norm_(policy=1.0, draft=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([result.policy_loss, result.draft_loss, norms["policy"], norms["draft"]])
    (folder / f"rank{rank}.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""What every rank of the demo does: bind, prove, train, evaluate, save."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

import spec_compile as sc

from .plain import StepNumbers
from .processes import everyone
from .proof import prove, with_old_logprobs
from .show import Clock, acceptance_table, bar, graph_excerpt, heading, say
from .task import Episode, Workload, pack, policy_loss


@dataclass(frozen=True)
class Run:
    """What the command line chose."""

    plan: sc.Plan
    steps: int
    folder: Path


def train(rank: int, work: Workload, run: Run, plain: StepNumbers, clock: Clock) -> None:
    """Do one rank's part; rank 0 prints and writes ``run.folder``."""
    with clock.phase("lowering"):
        model = sc.parallelize(work.target, work.draft, run.plan)
    try:
        _show_graph(model, run.folder if rank == 0 else None)
        batches = [pack(_own(model, group)) for group in work.train]
        heading(f"Proof at learning rate 0: {len(work.train[0])} documents, one joint step")
        with clock.phase("proof"):
            proof = prove(model, batches[0], plain, work.temperature)
        for line in proof.lines:
            say(line)
        if proof.broken:
            say(f"{len(proof.broken)} claims do not hold; the run ends here")
            raise SystemExit(1)
        _learn(rank, model, work, run, batches, clock)
        with clock.phase("saving"):
            _save(rank, model, run.folder)
        memory = everyone(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        say(
            f"peak memory: {sum(memory):.1f} GiB in all, {max(memory):.1f} GiB in the largest process"
        )
    finally:
        model.close()


def _learn(
    rank: int,
    model: sc.ParallelModel,
    work: Workload,
    run: Run,
    batches: list[sc.PackedBatch],
    clock: Clock,
) -> None:
    held_out = pack(_own(model, work.held_out))
    heading(f"Training: {run.steps} joint steps of policy and draft")
    with clock.phase("old log-probs"):
        batches = [with_old_logprobs(model, batch, work.temperature) for batch in batches]
    with clock.phase("evaluation"):
        before = model.evaluate(held_out)
    groups = model.param_groups(policy={"lr": work.policy_lr}, draft={"lr": work.draft_lr})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    with (run.folder / "metrics.jsonl").open("w") if rank == 0 else _nowhere() as file:
        for step in range(run.steps):
            start = clock.seconds.get("steps", 0.0)
            with clock.phase("steps", beat=False):
                metrics = _step(model, batches[step % len(batches)], optimizer, work.temperature)
            spent = clock.seconds["steps"] - start
            metrics |= {"step": step + 1, "seconds": spent}
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            left = (run.steps - step - 1) * clock.seconds["steps"] / (step + 1)
            say(_line(metrics, run.steps) + f" | {spent:4.1f} s, {left:3.0f} s left")
    with clock.phase("evaluation"):
        after = model.evaluate(held_out)
    heading(f"Predicted acceptance on {len(work.held_out)} held-out completions")
    for line in acceptance_table(before, after):
        say(line)


def _step(
    model: sc.ParallelModel,
    batch: sc.PackedBatch,
    optimizer: torch.optim.Optimizer,
    temperature: float,
) -> dict[str, float]:
    result = model.step(batch, policy_loss, temperature=temperature)
    norms = model.clip_grad_norm_(policy=1.0, draft=1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses = {"policy_loss": result.policy_loss, "draft_loss": result.draft_loss}
    return {**losses, **{f"{name}_norm": norm for name, norm in norms.items()}, **result.metrics}


def _line(metrics: dict[str, float], steps: int) -> str:
    accepted = metrics["step/draft_acceptance/0"]
    return (
        f"step {metrics['step']:>3}/{steps} | policy {metrics['policy_loss']:+.4f}, "
        f"ratio {metrics['ratio/min']:.2f}..{metrics['ratio/max']:.2f} | draft "
        f"{metrics['draft_loss']:6.3f}, accepted {accepted:.3f} {bar(accepted)}"
    )


def _show_graph(model: sc.ParallelModel, folder: Path | None) -> None:
    heading("The step, in words")
    lowered = model.lowered
    assert isinstance(lowered, sc.Lowered)
    say(lowered.explain())
    heading("The graph, in part")
    for line in graph_excerpt(lowered.history[0].before, lowered.text()):
        say(line)
    if folder is not None:
        (folder / "graph.txt").write_text(lowered.text())
        lowered.report(folder / "graph.html")


def _save(rank: int, model: sc.ParallelModel, folder: Path) -> None:
    """Write the draft as a public EAGLE-3 checkpoint; all ranks send what they own."""
    tensors = dict(model.export_weights("draft"))
    if rank == 0 and isinstance(model.draft, sc.drafts.Eagle3):
        saved = sc.drafts.Eagle3(model.draft.config)
        saved.load_state_dict(tensors)
        saved.save(folder / "draft")
    policy = {
        name: tensor.clone() for name, tensor in model.export_weights("policy", torch.bfloat16)
    }
    if rank == 0:
        config: Any = model.target.config
        shell: nn.Module = type(model.target)(config).to(torch.bfloat16)
        shell.load_state_dict(policy)
        shell.save_pretrained(folder / "policy")  # type: ignore[operator]


def _own(model: sc.ParallelModel, episodes: list[Episode]) -> list[Episode]:
    return episodes[model.dp_rank :: model.dp_size]


def _nowhere() -> TextIO:
    return Path("/dev/null").open("w")

"""What every rank of the demo does: bind, prove, warm the draft up, reinforce, save."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spec_compile as sc
from spec_compile import grpo

from . import reinforce, samples, warm_up
from .plain import StepNumbers
from .processes import everyone
from .proof import prove
from .show import Clock, graph_excerpt, heading, say
from .task import Workload


@dataclass(frozen=True)
class Run:
    """What the command line chose."""

    plan: sc.Plan
    warm_up_steps: int
    steps: int
    folder: Path


def train(rank: int, work: Workload, run: Run, plain: StepNumbers, clock: Clock) -> None:
    """Do one rank's part; rank 0 prints and writes ``run.folder``."""
    drawn = samples.load(run.folder / "rollouts.json")
    with clock.phase("engine"):
        engine = work.engine(work.draft)
    with clock.phase("lowering"):
        model = sc.parallelize(work.target, work.draft, run.plan)
    try:
        _show_graph(model, run.folder if rank == 0 else None)
        _prove(model, work, drawn, plain, clock)
        _warm_up(model, engine, work, drawn, run, clock)
        _reinforce(rank, model, engine, work, drawn, run, clock)
        with clock.phase("saving"):
            _save(rank, model, run.folder)
        memory = everyone(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        say(f"\npeak memory: {sum(memory):.1f} GiB in all, {max(memory):.1f} GiB in one process")
    finally:
        model.close()


def _prove(
    model: sc.ParallelModel,
    work: Workload,
    drawn: samples.Samples,
    plain: StepNumbers,
    clock: Clock,
) -> None:
    batch = samples.proof_batch(work, drawn, (model.dp_rank, model.dp_size))
    heading(f"(a) Proof at learning rate 0: {samples.PROOF_DOCUMENTS} documents, one joint step")
    with clock.phase("proof"):
        proof = prove(model, batch, plain, work.temperature)
    for line in proof.lines:
        say(line)
    if proof.broken:
        say(f"{len(proof.broken)} claims do not hold; the run ends here")
        raise SystemExit(1)


def _warm_up(
    model: sc.ParallelModel,
    engine: sc.Engine,
    work: Workload,
    drawn: samples.Samples,
    run: Run,
    clock: Clock,
) -> None:
    heading(
        f"(b) Warm-up: {run.warm_up_steps} steps of the draft alone, on the target's own answers"
    )
    groups = model.param_groups(draft={"lr": work.draft_lr})
    optimizer = torch.optim.AdamW(groups[1:], betas=(0.9, 0.95), weight_decay=0.0)
    found = warm_up.warm_up(model, engine, work, drawn, optimizer, run.warm_up_steps, clock)
    say("on held-out prompts:")
    for line in warm_up.table(found):
        say(line)


def _reinforce(
    rank: int,
    model: sc.ParallelModel,
    engine: sc.Engine,
    work: Workload,
    drawn: samples.Samples,
    run: Run,
    clock: Clock,
) -> None:
    heading(
        f"(c) GRPO: {run.steps} steps with co-training, then the same steps with a frozen draft"
    )
    trainer = _trainer(model, engine, work, run.folder / "metrics.jsonl", train_draft=True)
    before = reinforce.held_out(model, engine, work, clock)
    rate = reinforce.plain_decoding_rate(model, engine, work)
    start, end = (run.folder / f"{name}-rank{rank}.pt" for name in ("start", "trainer"))
    with clock.phase("saving"):
        torch.save(trainer.state_dict(), start)
    trained = reinforce.train(trainer, work, run.steps, clock, "co-trained")
    after = reinforce.held_out(model, engine, work, clock)
    lengths = [warm_up.measure(model, engine, work, drawn, run.steps, clock)]
    with clock.phase("saving"):
        torch.save(trainer.state_dict(), end)
    del trainer  # its optimizer's state, too
    frozen = _trainer(model, engine, work, run.folder / "metrics-frozen.jsonl", train_draft=False)
    frozen.load_state_dict(torch.load(start, weights_only=True))
    start.unlink()
    beside = reinforce.train(frozen, work, run.steps, clock, "frozen")
    lengths.append(warm_up.measure(model, engine, work, drawn, run.steps, clock))
    model.load_state_dict(torch.load(end, weights_only=True)["model"])
    for line in reinforce.summary(trained, beside, rate, [one.length for one in lengths]):
        say(line)
    heading("(d) Three answers to held-out questions")
    for question, answer, reward in after.shown:
        say(f"  reward {reward:.0f} | {question!r} -> {answer!r}")
    heading("(e) Held-out reward")
    for line in reinforce.interval(before, after):
        say(line)


def _trainer(
    model: sc.ParallelModel, engine: sc.Engine, work: Workload, log: Path, *, train_draft: bool
) -> grpo.Trainer:
    if model.dp_rank == 0:
        log.unlink(missing_ok=True)
    groups = model.param_groups(policy={"lr": work.policy_lr}, draft={"lr": work.draft_lr / 5})
    return grpo.Trainer(
        model,
        engine,
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
        work.reward,
        grpo.Settings(sampling=work.sampling(), train_draft=train_draft),
        tokenizer=work.tokenizer,
        log=log,
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

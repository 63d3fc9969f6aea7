"""The whole loop on this machine: generate with a draft, score, train both, generate again.

SmolLM2-135M and a fresh EAGLE-3 draft on small sums, with the proof that the numbers are right. Needs no
network: the model and its tasks come out of installed packages. All output goes to ``runs/demo``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import spec_compile as sc

from . import samples
from .data import CACHE
from .plain import StepNumbers, plain_step
from .processes import run_ranks
from .rank import Run, train
from .show import Clock, heading, say, seconds_table
from .task import Workload, smollm2

FOLDER = CACHE.parent / "demo"


def main(
    arguments: Sequence[str] | None = None,
    make: Callable[[], Workload] = smollm2,
    folder: Path = FOLDER,
) -> int:
    """Run the demo.

    Args:
        arguments: of the command line; None takes the process's own.
        make: builds models and data, the same on every rank.
        folder: what is written goes there.
    """
    options = _parse(arguments)
    plan = sc.Plan(cp=options.cp, pp=options.pp, dp=options.dp)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    _introduce(plan)

    heading("First completions by the engine, and one step in plain PyTorch (one process)")
    run_ranks(1, lambda rank: _plain(make, folder))
    plain = StepNumbers(**json.loads((folder / "plain.json").read_text())["numbers"])
    for name, value in dataclasses.asdict(plain).items():
        say(f"  {name.replace('_', ' '):22}{value:16.6f}")
    if options.plain:
        return 0

    heading(f"{plan.world_size} processes: cp={plan.cp}, pp={plan.pp}, dp={plan.dp}")
    run = Run(plan, options.warm_up, options.steps, folder)
    run_ranks(plan.world_size, lambda rank: _rank(rank, make, run, plain))
    seconds: dict[str, float] = {}
    for name in ("plain.json", "seconds.json"):
        seconds |= json.loads((folder / name).read_text())["seconds"]
    heading(f"Seconds by phase ({time.perf_counter() - started:.0f} s in all)")
    for line in seconds_table(seconds):
        say(line)
    heading(f"(f) Written to {os.path.relpath(folder)}")
    say("  graph.html     every pass with the graph before and after; open it in a browser")
    say("  graph.txt      the lowered graph of each stage")
    say("  metrics.jsonl  one line a GRPO step; metrics-frozen.jsonl: with the draft frozen")
    say("  trainer-*.pt   what each rank needs to go on: models, optimizer, engine")
    say("  draft/         EAGLE-3 checkpoint in the public format")
    say("  policy/        the trained target, a transformers folder in bfloat16")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.demo", description=__doc__)
    parser.add_argument("--cp", type=int, default=2, help="ranks that share the tokens (2)")
    parser.add_argument("--pp", type=int, default=2, help="ranks that share the layers (2)")
    parser.add_argument("--dp", type=int, default=1, help="replicas with their own documents (1)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps of the draft alone (20)")
    parser.add_argument("--steps", type=int, default=3, help="GRPO steps, done twice (3)")
    parser.add_argument("--plain", action="store_true", help="only the step in plain PyTorch")
    return parser.parse_args(arguments)


def _introduce(plan: sc.Plan) -> None:
    say(
        f"spec_compile {sc.__version__}: one joint RL step of a target and its draft, on {plan.world_size} processes."
    )
    say(
        f"{plan.world_size} processes on {os.cpu_count()} cores are slower than one: this run shows that the "
        "result is right; speed is measured elsewhere, on GPUs."
    )


def _plain(make: Callable[[], Workload], folder: Path) -> None:
    clock = Clock()
    with clock.phase("model", beat=False):
        work = make()
    with clock.phase("first rollouts"):
        drawn = samples.draw(work)
    samples.save(drawn, folder / "rollouts.json")
    with clock.phase("plain PyTorch step"):
        numbers = plain_step(work, samples.proof_batch(work, drawn))
    record = {"numbers": dataclasses.asdict(numbers), "seconds": clock.seconds}
    (folder / "plain.json").write_text(json.dumps(record))


def _rank(rank: int, make: Callable[[], Workload], run: Run, plain: StepNumbers) -> None:
    clock = Clock()
    with clock.phase("loading"):
        work = make()
    train(rank, work, run, plain, clock)
    if rank == 0:
        (run.folder / "seconds.json").write_text(json.dumps({"seconds": clock.seconds}))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)

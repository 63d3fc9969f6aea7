"""Real processes for models that were lowered once, before the fork."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import spec_compile as sc
from spec_compile import api
from spec_compile.batch import PackedBatch
from spec_compile.lowering import Lowered
from tests.models import gated_draft, packed_batch, tiny_llama
from tests.oracle import DenseResult, dense_step
from tests.ranks import Outcome, process_outcomes

TIMEOUT_S = 3.0
"""``Plan.timeout_s`` of the fault tests."""
MARGIN_S = 10.0
"""How long after ``timeout_s`` a rank may take to end."""
TOLERANCE = 1e-4


@dataclass
class Prepared:
    """Models, their plan, and the step that the plan lowers to."""

    target: Any
    draft: nn.Module | None
    plan: sc.Plan
    lowered: Lowered

    def parallelize(self) -> sc.ParallelModel:
        """Bind this rank: the whole of `sc.parallelize`, with the lowering done before the fork."""
        with mock.patch.object(api, "lower", return_value=self.lowered):
            return sc.parallelize(self.target, self.draft, self.plan)


def prepare(plan: sc.Plan, *, tied: bool = False) -> Prepared:
    """Lower tiny fp32 models for ``plan``."""
    target = tiny_llama(dtype=torch.float32, tied=tied)
    draft = gated_draft(target)
    return Prepared(target, draft, plan, sc.lower(target, draft, plan))


def batch_of(dp_rank: int, *, seed: int = 0) -> PackedBatch:
    """The batch of one data-parallel rank, of its own lengths."""
    lengths = [(7, 21, 1, 35, 0, 3), (5, 2, 18)][dp_rank]
    return packed_batch(lengths, dtype=torch.float32, seed=10 * seed + dp_rank, draft_mask=True)


def policy_loss(rows: sc.TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A clipped-ratio loss with an entropy bonus and two named sums."""
    mask = rows.mask
    ratio = (rows.logprobs - rows.fields["old_logprobs"]).clamp(-4, 4).exp()
    gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * rows.fields["advantages"]
    loss = -((gain + 0.01 * rows.entropy) * mask).sum()
    named = {"ratio": (ratio.detach() * mask).sum()}
    return loss, named | ({"entropy/max": rows.entropy.max()} if len(mask) else {})


def owned_grads(model: sc.ParallelModel) -> dict[str, Tensor]:
    """Gradients that this rank holds, by group and parameter name."""
    return {
        f"{group}.{name}": parameter.grad.clone()
        for group, module in (("policy", model.target), ("draft", model.draft))
        for name, parameter in (module.named_parameters() if module is not None else ())
        if parameter.grad is not None
    }


def oracle(prepared: Prepared, *, seed: int = 0) -> DenseResult:
    """The dense step on the batches of all data-parallel ranks."""
    batches = [batch_of(dp, seed=seed) for dp in range(prepared.plan.dp)]
    return dense_step(prepared.target, prepared.draft, batches, policy_loss)


def assert_step_equals(
    result: sc.StepResult, grads: dict[str, Tensor], expected: DenseResult
) -> None:
    """Compare what one rank got with the dense step."""
    torch.testing.assert_close(
        [result.policy_loss, result.draft_loss],
        [expected.policy_loss, expected.draft_loss],
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
    for name, value in expected.metrics.items():
        torch.testing.assert_close(result.metrics[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    dense = {f"policy.{n}": g for n, g in expected.policy_grads.items()}
    dense |= {f"draft.{n}": g for n, g in expected.draft_grads.items()}
    assert grads
    for name, grad in grads.items():
        torch.testing.assert_close(grad, dense[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def good_step(model: sc.ParallelModel, expected: DenseResult, *, seed: int = 0) -> None:
    """Run one step and compare this rank's part with the dense step."""
    for group in model.param_groups():
        for parameter in group["params"]:
            parameter.grad = None
    result = model.step(batch_of(model.dp_rank, seed=seed), policy_loss)
    assert_step_equals(result, owned_grads(model), expected)


@dataclass
class Ended:
    """How one rank of a faulty world ended, and how long after the fault began."""

    outcome: Outcome
    seconds: float
    waited_s: float = 0.0
    """How long its own threads were ready to run, after the fault began, and had no core."""

    @property
    def error(self) -> BaseException | None:
        """What the rank raised."""
        return self.outcome.error

    @property
    def text(self) -> str:
        """The message with its notes."""
        return "\n".join([str(self.error), *getattr(self.error, "__notes__", ())])


@dataclass
class Story:
    """A world in which one thing goes wrong: what each rank does up to it, and from it on."""

    before: Callable[[int], Any]
    """Called first, on every rank; its value goes to ``fault``."""
    fault: Callable[[int, Any], Any]
    during: Callable[[list[int]], None] | None = None
    """Runs in the parent with the process ids."""


def play(story: Story, *, world_size: int = 4, limit_s: float = 60.0) -> list[Ended]:
    """Run a story in forked processes; check that all end, in time, and leave no shared memory."""
    fork = multiprocessing.get_context("fork")
    began: Any = fork.Array("d", world_size)
    pids: Any = fork.Array("l", world_size)
    waited: Any = fork.Array("d", world_size)
    ready: Any = fork.Barrier(
        world_size
    )  # else one rank's fault may meet another's last step before it

    def body(rank: int) -> Any:
        pids[rank] = multiprocessing.current_process().pid or 0
        try:
            state = story.before(rank)
        except BaseException:
            ready.abort()
            raise
        ready.wait(limit_s)
        began[rank] = time.monotonic()
        before_s = queued_s()
        try:
            return story.fault(rank, state)
        finally:
            waited[rank] = queued_s() - before_s

    outcomes = process_outcomes(world_size, body, timeout=limit_s, during=story.during)
    told = "\n".join(f"rank {o.rank}: exit code {o.exitcode}\n{o.text}" for o in outcomes)
    assert all(o.exitcode is not None for o in outcomes), f"a rank hangs\n{told}"
    assert all(began[o.rank] for o in outcomes), f"a rank never came to the fault\n{told}"
    left = [str(path) for pid in pids for path in Path("/dev/shm").glob(f"spec_compile_{pid}_*")]
    assert not left, f"shared memory is left: {left}"
    latest = max(began)
    return [Ended(o, o.ended - latest, waited[o.rank]) for o in outcomes]


def queued_s() -> float:
    """Seconds that Python's threads here were ready to run and had no core; 0 where no kernel tells."""
    total = 0.0
    for thread in threading.enumerate():
        task = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        with contextlib.suppress(OSError):  # it has ended meanwhile
            total += int(task.read_text(encoding="ascii").split()[1]) / 1e9
    return total


def assert_ended(
    ended: Ended,
    kind: type[BaseException] | tuple[type[BaseException], ...],
    culprit: str,
    *,
    within_s: float = TIMEOUT_S + MARGIN_S,
) -> None:
    """This rank raised an error of ``kind`` that contains ``culprit``, in time, and exited."""
    assert isinstance(ended.error, kind), f"{ended.error!r}\n{ended.outcome.text}"
    assert culprit in ended.text, f"expected {culprit!r} in\n{ended.text}"
    assert ended.seconds < within_s, f"took {ended.seconds:.1f} s"
    assert ended.outcome.exitcode == 0

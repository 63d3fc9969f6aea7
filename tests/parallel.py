"""Bind models to all ranks of a plan as threads of this process, and run a test on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from spec_compile import Lowered, ParallelModel, Plan, lower
from spec_compile.runtime.threads import thread_worlds

from .ranks import run_threads

T = TypeVar("T")


def run_models(
    plan: Plan,
    target: nn.Module,
    draft: nn.Module | None,
    fn: Callable[[ParallelModel, int], T],
    *,
    timeout: float = 120.0,
) -> list[T]:
    """Lower once, then call ``fn(model, rank)`` on every rank."""
    return run_lowered(lower(target, draft, plan), target, draft, fn, timeout=timeout)


def run_lowered(
    lowered: Lowered,
    target: nn.Module,
    draft: nn.Module | None,
    fn: Callable[[ParallelModel, int], T],
    *,
    timeout: float = 120.0,
) -> list[T]:
    """Call ``fn(model, rank)`` on every rank, each with its own copies of target and draft."""
    plan = lowered.plan
    # torch.export is not thread-safe, so ranks copy one lowering instead of making their own
    copies = [copy.deepcopy((target, draft, lowered)) for _ in range(plan.world_size)]
    worlds = thread_worlds(plan)

    def body(rank: int) -> T:
        own_target, own_draft, own = copies[rank]
        model = ParallelModel(own, worlds[rank], own_target, own_draft)
        try:
            return fn(model, rank)
        except BaseException as error:
            worlds[rank].control.fail(error)
            raise
        finally:
            model.close()

    return run_threads(plan.world_size, body, timeout=timeout)

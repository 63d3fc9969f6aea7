"""One tiny target and draft, prompts, and trainers for all tests of the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import spec_compile as sc
from spec_compile import grpo
from tests.models import tiny_llama
from tests.parallel import run_lowered

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [2, 7]]
SAMPLING = sc.SamplingParams(n=4, max_tokens=6, stop_token_ids=(7, 11))
WIDE = sc.Plan(cp=2, pp=2)


@cache
def models() -> tuple[Any, Any]:
    target = tiny_llama(dtype=torch.float64)
    return target, sc.drafts.Eagle3.from_target(target, ttt_length=2)


@cache
def lowered(plan: sc.Plan) -> sc.Lowered:
    return sc.lower(*models(), plan)


def engine_of() -> sc.Engine:
    return sc.Engine(*models(), max_model_len=32, num_speculative_tokens=2)


def reward(prompts: Any, completions: Any, *, bonus: list[float], **columns: Any) -> list[float]:
    return [float(sum(ids)) % 5 + b for ids, b in zip(completions, bonus, strict=True)]


def trainer_of(
    model: sc.ParallelModel, reward_fn: Any = reward, lr: float = 1e-2, **options: Any
) -> grpo.Trainer:
    groups = model.param_groups(policy={"lr": lr}, draft={"lr": lr})
    optimizer = torch.optim.SGD(groups, lr=lr)
    settings = grpo.Settings(sampling=SAMPLING)
    return grpo.Trainer(model, engine_of(), optimizer, reward_fn, settings, **options)


COLUMNS = {"bonus": [0.0, 1.0, 2.0, 3.0]}


def run(plan: sc.Plan, fn: Callable[[sc.ParallelModel, int], Any]) -> list[Any]:
    target, draft = models()
    return run_lowered(lowered(plan), target, draft, fn)

"""What goes wrong on one rank is raised on all of them, and the next step is a good one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_compile as sc
from spec_compile import grpo

from .cases import COLUMNS, PROMPTS, SAMPLING, WIDE, engine_of, models, reward, run, trainer_of

SEEDED = dataclasses.replace(SAMPLING, seed=5)


def test_error_in_the_reward_of_one_rank_is_raised_on_all_and_the_next_step_works() -> None:
    def body(model: sc.ParallelModel, rank: int) -> float:
        broken = [rank == 2]

        def sometimes(prompts: Any, completions: Any, **columns: Any) -> list[float]:
            if broken[0]:
                raise ZeroDivisionError("no reward today")
            return reward(prompts, completions, **columns)

        trainer = trainer_of(model, sometimes)
        with pytest.raises(ZeroDivisionError, match="no reward today"):
            trainer.step(PROMPTS, COLUMNS)
        broken[0] = False
        mean: float = trainer.step(PROMPTS, COLUMNS)["reward/mean"]
        return mean

    assert len(set(run(WIDE, body))) == 1


@pytest.mark.parametrize(
    ("reward_fn", "columns", "match"),
    [
        (reward, {"bonus": [1.0]}, "'bonus' needs one entry a prompt, 4, found 1"),
        (lambda *args, **columns: [1.0], {}, "one finite number a completion"),
        (lambda p, completions, **c: [float("nan")] * len(completions), {}, "one finite number"),
        (lambda p, completions, **c: None, {}, "one finite number"),
        (lambda p, completions, **c: "1" * len(completions), {}, "one finite number"),
        (lambda p, completions, **c: [[1.0]] * len(completions), {}, "one finite number"),
        (reward, {"completion_ids": [1.0] * 4}, "another name"),
        (reward, [1.0], "columns must map"),
    ],
    ids=["column", "count", "nan", "none", "text", "nested", "own name", "list"],
)
def test_wrong_columns_and_rewards_are_refused_on_every_rank(
    reward_fn: Any, columns: dict[str, Any], match: str
) -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        with pytest.raises(sc.ConfigError, match=match):
            trainer_of(model, reward_fn).step(PROMPTS, columns)

    run(WIDE, body)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(sc.ConfigError, match="n must be 2 or more"):
        grpo.Settings(sampling=sc.SamplingParams(n=1))


def seeded(model: sc.ParallelModel, **options: Any) -> grpo.Trainer:
    trainer = trainer_of(model, **options)
    trainer.settings = dataclasses.replace(trainer.settings, sampling=SEEDED)
    return trainer


def test_a_step_that_failed_after_its_gradients_leaves_none_behind() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        clean = seeded(model).step(PROMPTS, COLUMNS)
        model.load_state_dict(state)
        trainer = seeded(model)
        step = trainer.optimizer.step
        trainer.optimizer.step = _out_of_memory  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            trainer.step(PROMPTS, COLUMNS)
        trainer.optimizer.step = step  # type: ignore[method-assign]
        again = trainer.step(PROMPTS, COLUMNS)
        for name in ("policy", "draft"):
            assert again[f"grad_norm/{name}"] == pytest.approx(clean[f"grad_norm/{name}"])

    run(sc.Plan(), body)


def _out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError


def test_an_engine_update_that_fails_on_one_rank_is_raised_on_all() -> None:
    def body(model: sc.ParallelModel, rank: int) -> float:
        trainer = trainer_of(model)
        update = trainer.engine.update_weights
        if rank == 1:
            trainer.engine.update_weights = _out_of_memory
        with pytest.raises(MemoryError):
            trainer.step(PROMPTS, COLUMNS)
        trainer.engine.update_weights = update
        mean: float = trainer.step(PROMPTS, COLUMNS)["reward/mean"]
        return mean

    assert len(set(run(WIDE, body))) == 1


def test_engines_count_alike_after_one_failed_before_it_counted() -> None:
    def body(model: sc.ParallelModel, rank: int) -> Any:
        engine = engine_of()
        generate = engine.generate
        if rank == 1:
            engine.generate = _out_of_memory  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            grpo.generate(model, engine, PROMPTS, SAMPLING)
        engine.generate = generate  # type: ignore[method-assign]
        return [one.tokens for one in grpo.generate(model, engine, PROMPTS, SAMPLING)]

    alone = engine_of()
    alone.generate(PROMPTS, SAMPLING)
    wanted = [one.tokens for one in alone.generate(PROMPTS, SAMPLING)]
    assert run(WIDE, body) == [wanted] * 4


def test_prompts_that_differ_between_ranks_are_refused_on_all() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        given = PROMPTS[::-1] if rank == 3 else PROMPTS
        with pytest.raises(sc.BatchError, match="same prompts"):
            grpo.generate(model, engine_of(), given, SAMPLING)
        with pytest.raises(sc.BatchError, match="at least one prompt"):
            trainer_of(model).step([])
        trainer_of(model).step(PROMPTS, COLUMNS)

    run(WIDE, body)


def test_a_log_that_cannot_be_written_is_refused_before_any_training(tmp_path: Path) -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        with pytest.raises(sc.ConfigError, match="cannot be written"):
            trainer_of(model, log=tmp_path / "missing" / "metrics.jsonl")
        trainer_of(model, log=str(tmp_path / "metrics.jsonl")).step(PROMPTS, COLUMNS)

    run(WIDE, body)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_policy_loss_that_calls_the_model_is_refused_and_the_next_step_works() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        rollouts = grpo.generate(model, engine_of(), PROMPTS, SAMPLING)
        batch = grpo.pack_rollouts(PROMPTS, rollouts, torch.ones(len(rollouts)))

        def nested(rows: sc.TokenOutputs) -> Any:
            return (rows.logprobs - model.logprobs(batch)).sum()

        with pytest.raises(sc.ConfigError, match="inside a call of its own"):
            model.step(batch, nested)
        model.step(batch, grpo.DapoLoss())

    run(WIDE, body)


def test_a_draft_is_trained_beside_an_engine_that_does_not_serve_it() -> None:
    def body(model: sc.ParallelModel, rank: int) -> float:
        groups = model.param_groups(policy={"lr": 1e-2}, draft={"lr": 1e-2})
        optimizer = torch.optim.SGD(groups, lr=1e-2)
        engine = sc.Engine(models()[0], max_model_len=32)
        settings = grpo.Settings(sampling=SAMPLING)
        return grpo.Trainer(model, engine, optimizer, reward, settings).step(PROMPTS, COLUMNS)[
            "draft_loss"
        ]

    assert run(sc.Plan(), body)[0] > 0


@pytest.mark.parametrize(
    "wrong",
    [{"updates": True}, {"updates": 1.5}, {"loss": None}, {"train_draft": 1}, {"max_grad_norm": -1.0},
     {"max_grad_norm": math.nan}, {"mask_truncated": "no"}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(sc.ConfigError, match=next(iter(wrong))):
        grpo.Settings(sampling=SAMPLING, **wrong)

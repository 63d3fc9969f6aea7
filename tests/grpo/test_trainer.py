"""The loop closes: rollouts of all ranks, the right gradients, and the trainer's weights in the engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import grpo
from tests.models import tiny_llama
from tests.oracle import dense_step
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


@pytest.mark.parametrize("seed", [None, 3])
def test_ranks_generate_together_what_one_engine_generates_alone(seed: int | None) -> None:
    params = sc.SamplingParams(n=3, max_tokens=6, seed=seed)
    alone = engine_of().generate(PROMPTS, params)

    def body(model: sc.ParallelModel, rank: int) -> Any:
        return grpo.generate(model, engine_of(), PROMPTS, params)

    for found in run(WIDE, body):
        assert [one.tokens for one in found] == [one.tokens for one in alone]
        for one, other in zip(found, alone, strict=True):
            assert one.prompt_index == other.prompt_index
            assert one.finish_reason == other.finish_reason
            torch.testing.assert_close(one.logprobs, other.logprobs)


def test_each_dp_index_gets_its_own_prompts() -> None:
    def body(model: sc.ParallelModel, rank: int) -> Any:
        found = grpo.generate(model, engine_of(), PROMPTS[:3], SAMPLING)
        return model.dp_rank, [one.prompt_index for one in found]

    wanted = {0: [0] * 4 + [2] * 4, 1: [1] * 4}
    for dp, prompts in run(sc.Plan(cp=2, dp=2), body):
        assert prompts == wanted[dp]


def test_gradients_of_a_grpo_step_equal_the_dense_step_on_the_same_rollouts() -> None:
    def body(model: sc.ParallelModel, rank: int) -> Any:
        rollouts = grpo.generate(model, engine_of(), PROMPTS, SAMPLING)
        rewards = torch.tensor([float(sum(one.tokens) % 5) for one in rollouts])
        advantages = grpo.group_advantages(rewards, SAMPLING.n)
        batch = grpo.pack_rollouts(PROMPTS, rollouts, advantages)
        result = model.step(batch, grpo.DapoLoss())
        grads = {
            f"{side}.{name}": parameter.grad.clone()
            for side, module in (("policy", model.target), ("draft", model.draft))
            if module is not None
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        return batch, result, grads

    outcomes = run(WIDE, body)
    batch, result, _ = outcomes[0]
    want = dense_step(*copy.deepcopy(models()), batch, grpo.DapoLoss())
    assert result.policy_loss == pytest.approx(want.policy_loss, rel=1e-9)
    assert result.draft_loss == pytest.approx(want.draft_loss, rel=1e-9)
    found: dict[str, Tensor] = {}
    for _, _, grads in outcomes:
        found |= grads
    for side, expected in (("policy", want.policy_grads), ("draft", want.draft_grads)):
        for name, grad in expected.items():
            torch.testing.assert_close(found[f"{side}.{name}"], grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("plan", [sc.Plan(), WIDE], ids=["pp1", "pp2"])
def test_after_a_step_the_engine_has_the_trainers_weights_bit_for_bit(plan: sc.Plan) -> None:
    places = {"policy": "_target", "draft": "_draft"}
    before = [{n: p.clone() for n, p in module.state_dict().items()} for module in models()]

    def body(model: sc.ParallelModel, rank: int) -> None:
        trainer = trainer_of(model)
        metrics = trainer.step(PROMPTS, COLUMNS)
        assert metrics["rollout/tokens"] > 0
        assert trainer.engine.weight_version == 1
        for which, old in zip(("policy", "draft"), before, strict=True):
            served = getattr(trainer.engine, places[which]).model.state_dict()
            live = dict(model.export_weights(which))
            assert served.keys() == live.keys()
            assert all(torch.equal(served[name], live[name]) for name in live)
            assert any(not torch.equal(live[name], old[name]) for name in live)

    run(plan, body)


def test_metrics_are_the_same_on_every_rank_and_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"

    def body(model: sc.ParallelModel, rank: int) -> Any:
        trainer = trainer_of(model, log=log)
        return [trainer.step(PROMPTS, COLUMNS) for _ in range(2)]

    outcomes = run(WIDE, body)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for steps in outcomes:
        for own, line in zip(steps, lines, strict=True):
            same = {name for name in own if not name.startswith("seconds/")}
            assert {name: own[name] for name in same} == {name: line[name] for name in same}
    first = lines[0]
    assert 0 < first["reward/mixed_groups"] <= 1
    assert first["mismatch"] == pytest.approx(1.0, abs=1e-6)  # engine and trainer: one law
    assert 1.0 <= first["rollout/acceptance_length"] <= 3.0


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
    ],
    ids=["column", "count", "nan"],
)
def test_wrong_columns_and_rewards_are_refused_on_every_rank(
    reward_fn: Any, columns: dict[str, Any], match: str
) -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        with pytest.raises(sc.ConfigError, match=match):
            trainer_of(model, reward_fn).step(PROMPTS, columns)

    run(WIDE, body)


def test_resumed_trainer_repeats_the_next_step() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        trainer = trainer_of(model)
        trainer.step(PROMPTS, COLUMNS)
        state = copy.deepcopy(trainer.state_dict())
        following = trainer.step(PROMPTS, COLUMNS)
        trainer.load_state_dict(state)
        again = trainer.step(PROMPTS, COLUMNS)
        for name in ("step", "policy_loss", "draft_loss", "reward/mean", "rollout/tokens"):
            assert again[name] == following[name]

    run(WIDE, body)


def test_several_updates_a_set_of_rollouts_clip_against_the_first_weights() -> None:
    def body(model: sc.ParallelModel, rank: int) -> Any:
        groups = model.param_groups(policy={"lr": 0.3}, draft={"lr": 0.0})
        settings = grpo.Settings(sampling=SAMPLING, updates=2)
        optimizer = torch.optim.SGD(groups, lr=0.3)
        trainer = grpo.Trainer(model, engine_of(), optimizer, reward, settings)
        return trainer.step(PROMPTS, COLUMNS)

    (metrics,) = run(sc.Plan(), body)
    assert metrics["ratio/min"] < 1.0 < metrics["ratio/max"]


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(sc.ConfigError, match="n must be 2 or more"):
        grpo.Settings(sampling=sc.SamplingParams(n=1))

"""The loop closes: rollouts of all ranks, the right gradients, and the trainer's weights in the engine."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import grpo
from tests.oracle import dense_step

from .cases import COLUMNS, PROMPTS, SAMPLING, WIDE, engine_of, models, reward, run, trainer_of


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

"""What the loop is given: things in each other's place, missing parameters, and functions with columns of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spec_compile as sc
from spec_compile import grpo
from spec_compile.runtime.grpo.scoring import Scorer

from .cases import SAMPLING, WIDE, engine_of, models, reward, run

ROLLOUTS = [sc.Rollout(i % 2, [1, 2 + i], [-0.5, -1.0], "stop", 0) for i in range(3)]
SETTINGS = grpo.Settings(sampling=SAMPLING)


def test_advantages_are_numbers_one_a_rollout() -> None:
    wanted = grpo.pack_rollouts([[5], [6]], ROLLOUTS, torch.tensor([1.0, 2.0, 3.0]))
    listed = grpo.pack_rollouts([[5], [6]], ROLLOUTS, [1, 2.0, 3])
    assert torch.equal(listed.fields["advantages"], wanted.fields["advantages"])
    for given, match in (
        ([1.0, 2.0], r"one number a rollout, \[3\], found shape \[2\]"),
        (torch.ones(3, 2), r"\[3\], found shape \[3, 2\]"),
        (torch.tensor(1.0), r"found shape \[\]"),
        (["a", "b", "c"], "a list of 3 numbers, found list"),
        (None, "a list of 3 numbers, found NoneType"),
    ):
        with pytest.raises(sc.BatchError, match=match):
            grpo.pack_rollouts([[5], [6]], ROLLOUTS, given)  # type: ignore[arg-type]


class Rewards:
    """Functions of many signatures; each gives the sum of what it was given."""

    @staticmethod
    def by_place(p: Any, c: Any, **columns: Any) -> list[float]:
        return [sum(ids) + a for ids, a in zip(c, columns["answer"], strict=True)]

    @staticmethod
    def one_column(prompts: Any, completions: Any, answer: Any) -> list[float]:
        return [sum(ids) + a for ids, a in zip(completions, answer, strict=True)]

    @staticmethod
    def by_name(completions: Any, answer: Any) -> list[float]:
        return [sum(ids) + a for ids, a in zip(completions, answer, strict=True)]

    @staticmethod
    def ids_alone(*, completion_ids: Any, answer: Any, **columns: Any) -> list[float]:
        return [sum(ids) + a for ids, a in zip(completion_ids, answer, strict=True)]


@pytest.mark.parametrize("reward_fn", [Rewards.by_place, Rewards.one_column, Rewards.by_name])
def test_a_reward_function_is_given_the_columns_that_it_takes(
    reward_fn: Callable[..., list[float]],
) -> None:
    columns = {"answer": [10, 20], "other": [0, 0]}
    assert Scorer(reward_fn).score([[5], [6]], columns, ROLLOUTS) == [13, 24, 15]
    assert Scorer(lambda p, c: [1.0] * len(c)).score([[5], [6]], columns, ROLLOUTS) == [1.0] * 3


@pytest.mark.parametrize(
    ("reward_fn", "match"),
    [
        (lambda prompts, completions, answers: [1.0], "missing.*'answers'"),
        (Rewards.ids_alone, "too many positional"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_told_what_there_is(
    reward_fn: Callable[..., list[float]], match: str
) -> None:
    with pytest.raises(sc.ConfigError, match=match) as caught:
        Scorer(reward_fn).score([[5], [6]], {"answer": [1, 2]}, ROLLOUTS)
    assert "what there is, prompts, completions, completion_ids, answer:" in str(caught.value)


def test_an_error_inside_a_reward_function_is_its_own() -> None:
    def broken(prompts: Any, completions: Any) -> list[float]:
        raise TypeError("unsupported operand")

    with pytest.raises(TypeError, match="unsupported operand"):
        Scorer(broken).score([[5], [6]], {}, ROLLOUTS)


def test_an_optimizer_that_lacks_parameters_of_one_rank_is_refused_on_all() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        groups = model.param_groups()
        if rank == 1:
            groups[0]["params"] = groups[0]["params"][:-2]
        optimizer = torch.optim.SGD(groups, lr=1e-2)
        with pytest.raises(sc.ConfigError, match=r"lacks 2 of the \d+ parameters of the policy"):
            grpo.Trainer(model, engine_of(), optimizer, reward, SETTINGS)
        foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-2)
        with pytest.raises(sc.ConfigError, match=r"over model\.param_groups\(\)"):
            grpo.Trainer(model, engine_of(), foreign, reward, SETTINGS)

    run(WIDE, body)


def test_an_optimizer_may_leave_out_what_is_frozen_or_not_trained() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        policy, draft = (group["params"] for group in model.param_groups())
        alone = torch.optim.SGD(policy, lr=1e-2)
        with pytest.raises(sc.ConfigError, match="parameters of the draft"):
            grpo.Trainer(model, engine_of(), alone, reward, SETTINGS)
        still = grpo.Settings(sampling=SAMPLING, train_draft=False)
        grpo.Trainer(model, engine_of(), alone, reward, still)
        for parameter in draft:
            parameter.requires_grad_(False)
        grpo.Trainer(model, engine_of(), alone, reward, SETTINGS)

    run(WIDE, body)


def test_model_and_engine_in_each_others_place_are_told_apart() -> None:
    def body(model: sc.ParallelModel, rank: int) -> None:
        engine, optimizer = engine_of(), torch.optim.SGD(model.param_groups(), lr=1e-2)
        for call in (
            lambda: grpo.Trainer(engine, model, optimizer, reward, SETTINGS),  # type: ignore[arg-type]
            lambda: grpo.update_engine(engine, model, 1),  # type: ignore[arg-type]
            lambda: grpo.generate(engine, model, [[1]], SAMPLING),  # type: ignore[arg-type]
        ):
            with pytest.raises(sc.ConfigError, match="what parallelize gives, found Engine"):
                call()
        with pytest.raises(sc.ConfigError, match=r"a rollout engine .*, found LlamaForCausalLM"):
            grpo.Trainer(model, models()[0], optimizer, reward, SETTINGS)
        with pytest.raises(sc.ConfigError, match=r"torch\.optim\.Optimizer, found list"):
            grpo.Trainer(model, engine, [], reward, SETTINGS)  # type: ignore[arg-type]

    run(WIDE, body)

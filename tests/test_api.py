"""parallelize in one process: binding, several models, errors before anything is bound."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spec_compile as sc
from spec_compile.errors import ConfigError, PlanError

from .models import gated_draft, packed_batch, tiny_llama
from .oracle import dense_step
from .step_cases import clipped


def test_several_models_in_one_process_train_side_by_side() -> None:
    first = tiny_llama(layers=2)
    second = copy.deepcopy(first)
    draft = gated_draft(first, taps=(1, 0), steps=2)
    batch = packed_batch((9, 4, 1))
    wanted = dense_step(first, draft, batch, clipped)
    reference = sc.parallelize(second, None, sc.Plan())
    model = sc.parallelize(first, draft, sc.Plan(micro_batches=2))
    assert (model.dp_rank, model.dp_size) == (0, 1)
    old = reference.logprobs(batch)
    result = model.step(batch, clipped)
    assert abs(result.policy_loss - wanted.policy_loss) < 1e-10
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.policy_grads[name], rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in second.parameters())
    model.close()
    assert torch.equal(reference.logprobs(batch), old)
    again = sc.parallelize(first, draft, sc.Plan())
    again.step(batch, clipped)
    again.close()
    reference.close()


def test_training_moves_the_original_parameters() -> None:
    target = tiny_llama(layers=2)
    draft = gated_draft(target, taps=(1, 0), steps=2)
    model = sc.parallelize(target, draft, sc.Plan())
    optimizer = torch.optim.SGD(model.param_groups(policy={"lr": 1e-2}, draft={"lr": 1e-2}))
    losses = []
    for _ in range(4):
        result = model.step(packed_batch((9, 4)), lambda rows: -(rows.logprobs * rows.mask).sum())
        losses.append((result.policy_loss, result.draft_loss))
        model.clip_grad_norm_(policy=1.0, draft=1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    assert losses[-1][0] < losses[0][0]
    assert losses[-1][1] < losses[0][1]


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PlanError, match="4 ranks"):
        sc.parallelize(tiny_llama(layers=2), None, sc.Plan(cp=2, dp=2))


@pytest.mark.parametrize("call", [sc.lower, sc.parallelize])
def test_models_and_plans_of_a_wrong_kind_are_refused(call: Callable[..., object]) -> None:
    target = tiny_llama(layers=2)
    draft = gated_draft(target, taps=(1, 0), steps=2)
    wrong: list[tuple[str, tuple[object, ...]]] = [
        ("target must be an nn.Module, found NoneType", (None, draft, sc.Plan())),
        (
            "target must be an nn.Module, found the class LlamaForCausalLM",
            (type(target), None, sc.Plan()),
        ),
        ("draft must be an nn.Module .* or None, found str", (target, "eagle3", sc.Plan())),
        ("plan must be a Plan, found NoneType", (target, draft, None)),
        ("plan must be a Plan, found dict", (target, draft, {"cp": 2})),
        ("plan must be a Plan, found the class Plan", (target, draft, sc.Plan)),
    ]
    for message, arguments in wrong:
        with pytest.raises(ConfigError, match=message):
            call(*arguments)


def test_weights_on_meta_cannot_be_bound() -> None:
    with pytest.raises(PlanError, match="meta"):
        sc.parallelize(tiny_llama(layers=2).to("meta"), None, sc.Plan())


def test_calls_that_need_another_plan_or_draft_say_so() -> None:
    model = sc.parallelize(tiny_llama(layers=2), None, sc.Plan())
    with pytest.raises(ConfigError, match="draft"):
        model.evaluate(packed_batch((4,)))
    with pytest.raises(ConfigError, match="export_weights"):
        list(model.export_weights("draft"))
    with pytest.raises(ConfigError, match="finalize_grads"):
        model.finalize_grads()
    assert model.counts(packed_batch((4,)))[1] == 0
    model.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"cp": 0}, {"pp": 1.5}, {"dp": True}, {"micro_batches": "2"}, {"schedule": "fastest"},
        {"cp_strategy": "rings"}, {"timeout_s": 0}, {"draft_weight": float("inf")}, {"verify": 1},
        {"param_dtype": "int8"}, {"seed": 1.0}, {"backend": "jit"},
    ],
)  # fmt: skip
def test_plan_values_that_cannot_be_meant_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        sc.Plan(**fields)  # type: ignore[arg-type]


def test_plan_from_toml_reads_fields_and_refuses_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[plan]\ncp = 2\nschedule = "gpipe"\n')
    assert sc.Plan.from_toml(path) == sc.Plan(cp=2, schedule="gpipe")
    path.write_text("micro_batch = 2\n")
    with pytest.raises(ConfigError, match="micro_batches"):
        sc.Plan.from_toml(path)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        sc.Plan.from_toml(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tp": 2}, "'tp' of a Plan: tensor parallelism is not supported"),
        ({"ep": 2}, "'ep' of a Plan: expert parallelism is not supported"),
        ({"micro_batch": 2}, "'micro_batch' of a Plan; did you mean 'micro_batches'"),
        ({"frobnicate": 2}, "'frobnicate' of a Plan; known keys: dp, cp"),
        ({"fsdp": 2}, "fsdp must be False, the only one implemented, found 2"),
        ({"schedule": "1F1B"}, "found '1F1B'; did you mean '1f1b'"),
        ({"schedule": "schedulegpipe"}, "did you mean 'ScheduleGPipe'"),
    ],
    ids=str,
)
def test_a_plan_says_what_an_unknown_name_or_choice_is_near_to(
    given: dict[str, object], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        sc.Plan(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        dataclasses.replace(sc.Plan(), **given)  # type: ignore[arg-type]
    path = tmp_path / "plan.toml"
    path.write_text("\n".join(f"{name} = {value!r}" for name, value in given.items()))
    with pytest.raises(ConfigError, match=match.replace(" of a Plan", ".* of a Plan")):
        sc.Plan.from_toml(path)


def test_a_plan_is_still_the_dataclass_that_its_signature_says() -> None:
    assert list(inspect.signature(sc.Plan).parameters)[:3] == ["dp", "cp", "pp"]
    assert pickle.loads(pickle.dumps(sc.Plan(cp=2))) == copy.copy(sc.Plan(cp=2)) == sc.Plan(cp=2)

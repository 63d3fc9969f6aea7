"""Arguments that would do nothing, or another thing than they seem to, are refused with what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spec_compile as sc
from spec_compile.errors import ConfigError

from .models import packed_batch, tiny_llama
from .parallel import run_models
from .step_cases import clipped


def frozen_llama(**options: Any) -> Any:
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2, **options)
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    return target


def test_options_of_groups_are_dicts_under_the_groups_names() -> None:
    model = sc.parallelize(
        tiny_llama(layers=2, hidden=8, vocab=13, heads=2), None, sc.Plan(verify=False)
    )
    for call, match in (
        (lambda: model.param_groups(policy=1e-6), "found policy=1e-06; put it into a dict"),  # type: ignore[arg-type]
        (lambda: model.param_groups(lr=1.0), "policy={'lr': 1e-6}.*found 'lr'; put it into"),  # type: ignore[arg-type]
        (lambda: model.param_groups(drafts={}), "found 'drafts'; did you mean 'draft'"),  # type: ignore[arg-type]
        (lambda: model.clip_grad_norm_(1.0), r"found 1\.0 for none.*policy=1\.0, draft=1\.0"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=match):
            call()
    assert model.param_groups(policy={"lr": 2.0})[0]["lr"] == 2.0
    assert model.clip_grad_norm_(policy=1.0) == {"policy": 0.0, "draft": 0.0}
    model.close()


ROWS = torch.zeros(2, dtype=torch.int64)
UNKNOWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (sc.grpo.Settings, {"beta": 0.1}, "'beta' of a Settings: there is no term against a reference"),
    (sc.grpo.Settings, {"temperature": 1.0}, "'temperature' .*: put it into sampling=SamplingPar"),
    (sc.grpo.Settings, {"clip_low": 0.1}, "'clip_low' .*: put it into loss=DapoLoss"),
    (sc.grpo.Settings, {"num_generations": 8}, "'num_generations' .*: it is sampling.n"),
    (sc.grpo.Settings, {"update": 2}, "'update' of a Settings; did you mean 'updates'"),
    (sc.grpo.DapoLoss, {"clip_hi": 0.3}, "'clip_hi' of a DapoLoss; did you mean 'clip_high'"),
    (sc.SamplingParams, {"max_new_tokens": 9}, "'max_new_tokens' .*; did you mean 'max_tokens'"),
    (sc.SamplingParams, {"frobnicate": 9}, "'frobnicate' .*; known keys: n, temperature, top_k"),
    (sc.PackedBatch, {"advantages": ROWS}, "'advantages' .*known keys: tokens.*into fields="),
    (sc.PackedBatch, {"anchor": ROWS}, "'anchor' of a PackedBatch; did you mean 'anchors'"),
]


@pytest.mark.parametrize(("kind", "options", "match"), UNKNOWN)
def test_an_option_that_a_class_does_not_have_is_named_beside_what_it_may_mean(
    kind: Callable[..., Any], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {match}"):
        kind(**options)


def test_known_options_are_kept_and_missing_ones_are_pythons_own_error() -> None:
    sampling = sc.SamplingParams(n=2)
    settings = sc.grpo.Settings(sampling=sampling, updates=3)
    assert (settings.sampling, settings.updates) == (sampling, 3)
    assert dataclasses.replace(settings, updates=4).updates == 4
    assert sc.grpo.DapoLoss(0.1, clip_high=0.3) == sc.grpo.DapoLoss(clip_low=0.1, clip_high=0.3)
    with pytest.raises(TypeError, match="sampling"):
        sc.grpo.Settings(updates=3)  # type: ignore[call-arg]


def test_a_policy_loss_of_a_wholly_frozen_target_is_refused_and_the_draft_still_trains() -> None:
    target = frozen_llama()
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=1)
    batch = packed_batch((5, 9), vocab=13)

    def body(model: sc.ParallelModel, rank: int) -> float:
        with pytest.raises(ConfigError, match="no parameter of LlamaForCausalLM requires a grad"):
            model.step(batch, clipped)
        return model.step(batch, None).draft_loss

    assert min(run_models(sc.Plan(pp=2, verify=False), target, draft, body)) > 0


@pytest.mark.slow
def test_a_target_that_trains_on_one_stage_alone_takes_a_policy_loss() -> None:
    target = frozen_llama()
    target.model.norm.weight.requires_grad_(True)

    def body(model: sc.ParallelModel, rank: int) -> int:
        model.step(packed_batch((5, 9), vocab=13), clipped)
        return sum(p.grad is not None for p in model.target.parameters())

    assert run_models(sc.Plan(pp=2, verify=False), target, None, body) == [0, 1]


def test_a_field_that_a_batch_has_not_is_named_beside_those_it_has() -> None:
    rows = sc.TokenOutputs(
        **{
            name: torch.zeros(1)
            for name in ("logprobs", "entropy", "mask", "tokens", "document", "cu_seqlens")
        },
        fields={"advantages": torch.ones(1)},
    )
    assert rows.fields["advantages"].item() == 1
    assert rows.fields.get("old_logprobs") is None
    with pytest.raises(KeyError, match="no field 'old_logprobs'; it has: advantages"):
        rows.fields["old_logprobs"]


@pytest.mark.slow
def test_the_rows_of_a_step_name_the_fields_that_its_batch_has() -> None:
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2)
    model = sc.parallelize(target, None, sc.Plan(verify=False))
    batch = packed_batch((5, 9), vocab=13)
    for rows_of in (
        lambda: model.step(batch, lambda rows: rows.fields["mine"].sum()),
        lambda: model(batch).fields["mine"],
    ):
        with pytest.raises(KeyError, match=r"no field 'mine'; it has: .*advantages"):
            rows_of()
    model.close()

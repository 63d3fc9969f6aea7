"""Taps in whole steps: the same bits on any number of stages, sent once each, whatever the pace of the ranks."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan, lower
from spec_compile.drafts import Eagle3
from spec_compile.lowering import Lowered
from spec_compile.runtime.stage_run import StageRun
from spec_compile.runtime.taps import TapChannels

from .models import randomise, tiny_qwen3
from .parallel import run_models
from .step_cases import (
    VOCAB,
    assert_gradients,
    batches,
    bound,
    clipped,
    dense,
    gradients_of,
    joined,
    models,
)

DEEP = "qwen3_deep"


def draft_bits(taps: tuple[int, ...], pp: int) -> tuple[float, dict[str, Tensor]]:
    """Draft loss and gradients of a step on ``pp`` stages, from its last rank."""
    target = models(DEEP, "none")[0]
    draft = randomise(Eagle3.from_target(target, 3, taps=taps), 1)
    batch = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> tuple[float, dict[str, Tensor | None]]:
        return model.step(batch, clipped).draft_loss, gradients_of(model)

    plan = Plan(pp=pp, micro_batches=4, verify=False)
    loss, grads = run_models(plan, target, draft, body)[-1]
    return loss, {n: g for n, g in grads.items() if n.startswith("draft.") and g is not None}


@pytest.mark.slow
@pytest.mark.parametrize("taps", [(2, 4, 5), (0, 1, 2), (6, 7, 7)])
def test_a44_a_draft_gets_the_same_bits_on_any_number_of_stages(taps: tuple[int, ...]) -> None:
    loss, grads = draft_bits(taps, 1)
    assert grads
    for pp in (2, 3):
        other_loss, other_grads = draft_bits(taps, pp)
        assert other_loss == loss
        assert grads.keys() == other_grads.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, other_grads[name]), name


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    """Four stages of two layers, whose taps lie on the first three; one is read twice."""
    target = models(DEEP, "none")[0]
    plan = Plan(pp=4, micro_batches=4, verify=False)
    return lower(target, Eagle3.from_target(target, 1, taps=(1, 3, 3, 5)), plan)


def test_a_tap_that_is_read_twice_is_sent_once(lowered: Lowered) -> None:
    sent = Counter(t.what for t in lowered.facts.tap_values if "layers" in t.what)
    assert sent == {"after 1 layers": 1, "after 3 layers": 1, "after 5 layers": 1}


def test_a41_sends_that_nobody_on_their_stage_uses_survive_cleaning(lowered: Lowered) -> None:
    for name, gm in lowered.graphs.items():
        for _ in range(2):
            gm.graph.eliminate_dead_code()
        kinds = Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        last = name == "stage3"
        assert kinds["spec_compile.tap_send.default"] == (0 if last else 1)
        assert kinds["spec_compile.tap_recv.default"] == (3 if last else 0)


@pytest.mark.slow
def test_a49_no_layer_is_lost_in_an_uneven_split_and_its_last_boundary_can_be_tapped() -> None:
    with torch.device("meta"):
        target = tiny_qwen3(layers=30, vocab=VOCAB)
    draft = Eagle3.from_target(target, 2, taps=(1, 15, 29))
    lowered = lower(target, draft.to("meta"), Plan(pp=4, verify=False))
    layers = [i for first, past in lowered.facts.stage_layers for i in range(first, past)]
    assert layers == list(range(30))
    held = [
        name
        for gm in lowered.graphs.values()
        for name, _ in gm.named_parameters()
        if "q_proj" in name
    ]
    assert len({n for n in held if "layers" in n}) == 30


@pytest.mark.slow
def test_a50_both_copies_of_a_tied_embedding_get_the_same_bits_with_replicas() -> None:
    given = batches(2)

    def body(model: ParallelModel, rank: int) -> dict[str, Tensor | None]:
        model.step(given[model.dp_rank], clipped)
        return gradients_of(model)

    plan = Plan(pp=2, dp=2, micro_batches=2)
    found = bound("qwen3_deep_tied", "eagle3", plan, body)
    copies = [grads["policy.model.embed_tokens.weight"] for grads in found]
    assert all(copy is not None and torch.equal(copy, copies[0]) for copy in copies)  # type: ignore[arg-type]
    assert_gradients(found, joined(dense("qwen3_deep_tied", "eagle3", 2)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a52_two_hundred_steps_of_ranks_with_a_pace_of_their_own() -> None:
    """Four stages sleep at random before forwards, backwards, pushes and pulls; every loss is the same."""
    batch, dice = batches(1)[0], random.Random(5)

    def slowly(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if dice.random() < 0.3:
                time.sleep(dice.random() * 2e-3)
            return original(self, *args, **kwargs)

        return call

    def body(model: ParallelModel, rank: int) -> set[float]:
        return {model.step(batch, clipped).draft_loss for _ in range(200)}

    plan = Plan(pp=4, micro_batches=6, timeout_s=60.0)
    places: list[tuple[type, str]] = [
        (StageRun, "forward"), (StageRun, "backward"), (TapChannels, "push"), (TapChannels, "pull")
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            slow = slowly(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, slow))
        outcomes = bound(DEEP, "eagle3", plan, body, timeout=390)
    assert len(set.union(*outcomes)) == 1

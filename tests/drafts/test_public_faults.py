"""Faults that other draft trainers were reported for: positions, supervised rows, names, tying."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import spec_compile as sc
from spec_compile.contract import DraftInputs
from spec_compile.drafts import MTP, DFlash, DSpark, Eagle3, PEagle
from spec_compile.errors import ConfigError
from tests.models import packed_batch, randomise, tiny_llama
from tests.oracle import draft_inputs, run_target
from tests.parallel import run_models

FAMILIES: dict[str, Callable[[Any], Any]] = {
    "eagle3": lambda t: Eagle3.from_target(t, 3),
    "mtp": lambda t: MTP.from_target(t, 3),
    "peagle": lambda t: PEagle.from_target(t, 3, num_hidden_layers=2),
    "dflash": lambda t: DFlash.from_target(t, 4, num_hidden_layers=2),
    "dspark": lambda t: DSpark.from_target(t, 3, num_hidden_layers=2, markov_rank=5),
}
ANCHORS = (2, 4, 6, -1)


def drafted(family: str) -> tuple[Any, DraftInputs]:
    """Give a draft and the inputs of one document: five tokens of a prompt, four of an answer."""
    target = tiny_llama(layers=3)
    draft = randomise(FAMILIES[family](target), 3)
    batch = packed_batch((9,))
    batch.loss_mask = torch.arange(9) >= 5
    batch.anchors = torch.tensor(ANCHORS) if family.startswith("d") else None
    row = run_target(target, batch, draft.taps, grad=False)
    return draft, draft_inputs(target, batch, row)


def loss_of(draft: Any, inputs: DraftInputs) -> Tensor:
    with torch.no_grad():
        total: Tensor = draft(inputs).loss_sum.sum()
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_a30_rotary_follows_the_positions_that_it_is_given(family: str) -> None:
    draft, inputs = drafted(family)
    loss = loss_of(draft, inputs)
    apart = dataclasses.replace(inputs, positions=3 * inputs.positions)
    moved = dataclasses.replace(inputs, positions=inputs.positions + 7)
    assert abs(loss_of(draft, apart) - loss) > 1e-4
    # only distances count, so this holds for whoever reads positions, and fails where they mix with row numbers
    torch.testing.assert_close(loss_of(draft, moved), loss, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_a30_a_later_step_is_one_position_further(family: str) -> None:
    draft, inputs = drafted(family)
    asked: list[Tensor] = []
    step = draft.step

    def watched(hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Any) -> Any:
        asked.append(positions)
        return step(hidden, embedded, positions, attend)

    def standing(hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Any) -> Any:
        return step(hidden, embedded, inputs.positions, attend)

    draft.step = watched
    loss = loss_of(draft, inputs)
    assert [x.tolist() for x in asked] == [list(range(k, k + 9)) for k in range(3)]
    draft.step = standing
    assert abs(loss_of(draft, inputs) - loss) > 1e-4


def silent(draft: nn.Module) -> None:
    """Let attention add nothing, so that a row's loss depends on its own feature alone."""
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("o_proj.weight"):
                parameter.zero_()


SUPERVISED = {0: [3, 4, 5, 6], 1: [2, 3, 4, 5], 2: [1, 2, 3, 4]}
"""By hand: row t at step k predicts token t + 2 + k, and tokens 5 to 8 are the answer."""


@pytest.mark.parametrize("family", ["eagle3", "mtp", "peagle"])
def test_a39_the_first_answer_token_is_predicted_at_every_step(family: str) -> None:
    draft, inputs = drafted(family)
    silent(draft)
    leaf = (inputs.teacher.hidden if family == "mtp" else inputs.features).requires_grad_()
    teacher = SimpleNamespace(hidden=inputs.teacher.hidden, weight=inputs.teacher.weight)
    output = draft(dataclasses.replace(inputs, teacher=teacher))
    if family == "peagle":  # deeper elements do not read the features of their row
        assert int(output.count) == 12
        (grad,) = torch.autograd.grad(output.loss_sum, leaf)
        assert grad.any(1).nonzero()[:, 0].tolist() == SUPERVISED[0]
        return
    assert output.count.tolist() == [4, 4, 4]
    for step, rows in SUPERVISED.items():
        (grad,) = torch.autograd.grad(output.loss_sum[step], leaf, retain_graph=True)
        assert grad.any(1).nonzero()[:, 0].tolist() == rows, step


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        # labels of the slots: 3 4 5 | 5 6 7 | 7 8 9, and only 5 to 8 are targets
        ("dflash", [2, 2, 2]),
        # a block ends at its first slot that is no target, so the first block has none
        ("dspark", [2, 2, 1]),
    ],
)
def test_a39_slots_of_a_block_are_supervised_where_their_token_is(
    family: str, counts: list[int]
) -> None:
    draft, inputs = drafted(family)
    stats = draft(inputs).stats
    assert [int(stats[f"slot_count/{j}"]) for j in range(3)] == counts


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "compiled part": lambda d: setattr(d, "midlayer", torch.compile(d.midlayer)),
    "compiled head": lambda d: setattr(d, "lm_head", torch.compile(d.lm_head)),
    "checkpointed part": lambda d: setattr(d, "midlayer", checkpoint_wrapper(d.midlayer)),
}


@pytest.mark.parametrize(
    "how",
    [pytest.param(h, marks=[pytest.mark.slow] if h != "compiled part" else []) for h in WRAPPED],
)
def test_a66_names_of_a_wrapped_draft_are_those_of_the_plain_one(how: str, tmp_path: Path) -> None:
    target = tiny_llama(layers=2)
    plain = randomise(Eagle3.from_target(target, 2), 3)
    draft = randomise(Eagle3.from_target(target, 2), 3)
    WRAPPED[how](draft)

    def body(model: Any, rank: int) -> dict[str, Tensor]:
        model.step(packed_batch((9, 4)), None)
        state = model.state_dict()
        assert not any("_orig_mod" in n or "_checkpoint" in n for n in state)
        model.load_state_dict(state)
        return dict(model.export_weights("draft"))

    for exported in run_models(sc.Plan(pp=2, verify=False), target, draft, body):
        assert exported.keys() == plain.state_dict().keys()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(exported[name], tensor), name
        plain.load_state_dict(exported)
        sc.drafts.save(draft, tmp_path, tensors=exported)
        engine = sc.Engine(target, plain)
        engine.update_weights("draft", exported, 1)
    draft.save(tmp_path / "own")
    back = sc.drafts.load(tmp_path / "own").state_dict()
    assert torch.equal(back["lm_head.weight"], plain.lm_head.weight)


def test_a66_an_update_without_one_known_name_is_an_error() -> None:
    target = tiny_llama(layers=2)
    draft = Eagle3.from_target(target, 2)
    engine = sc.Engine(target, draft)
    twice = {f"draft_model.draft_model.{n}": t for n, t in draft.state_dict().items()}
    for tensors in (twice, {}):
        with pytest.raises(ConfigError, match=r"has no .draft_model|tensors are missing"):
            engine.update_weights("draft", tensors, 1)


def test_a67_a_reduced_draft_of_a_tied_target_resumes_with_the_same_loss(tmp_path: Path) -> None:
    target = tiny_llama(layers=3, tied=True, vocab=200)
    chosen = torch.arange(0, 200, 4)
    draft = randomise(Eagle3.from_target(target, 3, draft_vocab=chosen), 3)
    sc.drafts.save(draft, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    back: Any = sc.drafts.load(tmp_path)
    assert back.lm_head.weight.shape == (50, 32)
    batch = packed_batch((9, 14, 1), vocab=200)
    inputs = draft_inputs(target, batch, run_target(target, batch, draft.taps, grad=False))
    loss = float(loss_of(back, inputs))
    assert loss == float(loss_of(draft, inputs))
    assert math.isfinite(loss)

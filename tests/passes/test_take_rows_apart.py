"""Depths that share one pass of every layer, and one attention call, step like those that are written apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import Plan, lower
from spec_compile.drafts import PEagle
from spec_compile.errors import PlanError
from tests.analysis.row_bodies import Expression, lower_expression, total, worst_difference
from tests.joined_drafts import JoinedPEagle
from tests.models import packed_batch, randomise, tiny_qwen3
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.step_cases import assert_gradients, gradients_of, joined

VOCAB, DIM = 61, 32
LENGTHS = (7, 21, 1, 16, 0, 3)
ANCHORS = torch.tensor([0, 3, 6, 7, 9, 15, 16, 27, 28, 29, 44, 46, -1, -1])


def target() -> Any:
    return tiny_qwen3(layers=2, vocab=VOCAB, hidden=DIM)


def pair(
    kind: type[JoinedPEagle] = JoinedPEagle, *, depths: int = 3, layers: int = 2, **options: Any
) -> tuple[PEagle, JoinedPEagle]:
    """The declared draft, and the joined one with the same parameters."""
    apart = PEagle.from_target(target(), depths, num_hidden_layers=layers, **options).double()
    randomise(apart, 1)
    together = kind(apart.config, dtype=torch.float64, draft_vocab=options.get("draft_vocab"))
    together.load_state_dict(apart.state_dict())
    return apart, together


def check(apart: PEagle, together: JoinedPEagle, plan: Plan, kind: str = "diagonal") -> None:
    """Loss and gradients of a step of the joined draft are those of the declared one on one device."""
    model, batch = target(), packed_batch(LENGTHS, vocab=VOCAB, seed=4)
    batch.anchors = None if apart.config.anchors_per_document is None else ANCHORS
    wanted = dense_step(model, apart, batch, None)
    lowered = lower(model, together, plan)
    found = [fact.branches for fact in lowered.facts.attentions if "draft" in fact.owner]
    depths = range(apart.config.num_depths)
    assert found == [(kind,) * depth for depth in depths] * apart.config.num_hidden_layers

    def step(parallel: Any, rank: int) -> Any:
        result = parallel.step(batch, None)
        return result.draft_loss, gradients_of(parallel)

    outcomes = run_lowered(lowered, model, together, step)
    for loss, _ in outcomes:
        assert loss == pytest.approx(wanted.draft_loss, rel=1e-9)
    names = {n: g for n, g in joined(wanted).items() if n.startswith("draft.")}
    owned = [{n: g for n, g in grads.items() if n.startswith("draft.")} for _, grads in outcomes]
    assert_gradients(owned, names)


def test_two_depths_in_one_pass_step_like_those_apart() -> None:
    check(*pair(depths=2, layers=1), Plan(cp=2, verify=False))


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_a_joined_peagle_steps_like_the_declared_one(cp: int, pp: int) -> None:
    check(*pair(), Plan(cp=cp, pp=pp, micro_batches=pp))


@pytest.mark.slow
@pytest.mark.parametrize("spelling", [("repeat", "split"), ("grid", "view")], ids="-".join)
def test_other_spellings_of_joined_rows_are_the_same(spelling: tuple[str, str]) -> None:
    apart, together = pair(layers=1)
    together.joining, together.sums = spelling
    check(apart, together, Plan(cp=2, verify=False))


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["all", "split"])
def test_later_depths_at_anchors_are_runs_of_anchors(sums: str) -> None:
    apart, together = pair(layers=2, anchors_per_document=4)
    together.sums = sums
    check(apart, together, Plan(cp=2), "block")


@pytest.mark.slow
def test_a_reduced_vocabulary_has_one_loss_over_joined_rows() -> None:
    known = torch.arange(3, 54, 3)
    check(*pair(depths=2, layers=1, draft_vocab=known), Plan(cp=2, verify=False))


class PlainLoss(JoinedPEagle):
    """PyTorch's own loss, summed over the rows of all depths at once."""

    def loss(self, inputs: sc.DraftInputs, states: Tensor, sizes: list[int]) -> sc.DraftOutput:
        labels = []
        for depth in range(len(sizes)):
            valid = sc.shift(inputs.loss_mask, depth + 2, inputs.document)
            token = sc.shift(inputs.tokens, depth + 2, inputs.document)
            labels.append(torch.where(valid, token, -100))
        every = torch.cat(labels)
        logits = self.lm_head(states)
        loss = F.cross_entropy(logits, every, reduction="sum", ignore_index=-100)
        return sc.DraftOutput(loss, (every >= 0).sum())


@pytest.mark.slow
def test_a_plain_loss_is_summed_over_joined_rows() -> None:
    _, together = pair(PlainLoss, depths=2, layers=1)
    check(together, together, Plan(cp=2, verify=False))


class Scanned(JoinedPEagle):
    def loss(self, inputs: sc.DraftInputs, states: Tensor, sizes: list[int]) -> sc.DraftOutput:
        return super().loss(inputs, states.cumsum(0), sizes)


class CutElsewhere(JoinedPEagle):
    def loss(self, inputs: sc.DraftInputs, states: Tensor, sizes: list[int]) -> sc.DraftOutput:
        return super().loss(inputs, torch.cat([states[1:], states[:1]]), sizes)


class RowByRow(JoinedPEagle):
    def loss(self, inputs: sc.DraftInputs, states: Tensor, sizes: list[int]) -> sc.DraftOutput:
        mixed = states.reshape(-1, len(sizes), states.shape[-1]).sum(1)
        return super().loss(inputs, mixed.repeat(len(sizes), 1), sizes)


class NextDepth(JoinedPEagle):
    def elements(self, inputs: sc.DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        anchor, depth, used = super().elements(inputs)
        return (anchor - (depth == 2).to(anchor.dtype)).clamp_min(0), depth, used


WRONG: dict[str, tuple[type[JoinedPEagle], str]] = {
    "scanned": (Scanned, "cumsum.* reads 3 runs of rows at once"),
    "cut elsewhere": (
        CutElsewhere,
        "slice.* reads 3 runs of rows at once|cuts joined rows elsewhere",
    ),
    "row by row": (RowByRow, "reshape.* reads 3 runs of rows at once"),
    "another's keys": (NextDepth, "another form than branch_attention's, in run 2 of queries"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_joined_rows_is_refused_with_its_line(name: str) -> None:
    kind, message = WRONG[name]
    _, together = pair(kind, layers=1)
    with pytest.raises(PlanError, match=message) as caught:
        lower(target(), together, Plan(cp=2, verify=False))
    lines = ("test_take_rows_apart.py:", "joined_drafts.py:")
    assert any(line in str(caught.value) for line in lines)


def twice(h: Tensor) -> Tensor:
    return torch.cat([h, h * 2])


UNKNOWN_LOSSES: dict[str, Expression] = {
    "triplet_margin_loss": lambda m, i, h: F.triplet_margin_loss(h, h * 2, h * 3, reduction="sum"),
    "cosine_embedding_loss": lambda m, i, h: F.cosine_embedding_loss(
        h, h * 2, h[:, 0].sign(), reduction="sum"
    ),
    "margin_ranking_loss": lambda m, i, h: F.margin_ranking_loss(
        h[:, 0], h[:, 1], h[:, 2].sign(), reduction="sum"
    ),
    "hinge_embedding_loss": lambda m, i, h: F.hinge_embedding_loss(h, h.sign(), reduction="sum"),
    "poisson_nll_loss": lambda m, i, h: F.poisson_nll_loss(h, h.exp(), reduction="sum"),
    "layer_norm": lambda m, i, h: F.layer_norm(h, h.shape).sum(),
    "pairwise_distance": lambda m, i, h: F.pairwise_distance(h, h * 2).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "joined_rows"),
    [
        (n, j)
        for n in UNKNOWN_LOSSES
        for j in (False, True)
        if j or n != "layer_norm"  # alone it is known to run over rows
    ],
)
def test_a_loss_that_no_rule_knows_is_refused_with_its_line_and_what_to_write(
    name: str, joined_rows: bool
) -> None:
    loss = UNKNOWN_LOSSES[name]

    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
        return total(loss(m, i, twice(h) if joined_rows else h), i)

    message = (
        rf"test_take_rows_apart.py:\d+ in <lambda>: (.|\n)*{name}.*write it with elementwise op"
    )
    with pytest.raises(PlanError, match=message):
        lower_expression(body)


KNOWN_LOSSES: dict[str, Expression] = {
    "mse": lambda m, i, h: F.mse_loss(h, h.square(), reduction="sum"),
    "huber of each row": lambda m, i, h: F.huber_loss(h, h.square(), reduction="none").sum(),
    "bce": lambda m, i, h: F.binary_cross_entropy(
        h.sigmoid(), h.square().sigmoid(), reduction="sum"
    ),
    "bce of logits": lambda m, i, h: F.binary_cross_entropy_with_logits(
        h, h.square().sigmoid(), reduction="sum", pos_weight=m.vec.detach().square()
    ),
    "bce of each row": lambda m, i, h: F.binary_cross_entropy(
        h.sigmoid(), h.square().sigmoid(), reduction="none"
    ).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_LOSSES)
def test_losses_that_add_up_joined_rows_are_exact_on_two_ranks(name: str) -> None:
    loss = KNOWN_LOSSES[name]
    assert worst_difference(lambda m, i, h: total(loss(m, i, twice(h)), i)) < 1e-9

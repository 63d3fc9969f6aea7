"""Rows added to fill the ranks are never real rows, whatever a draft does: steps equal the dense one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.lowering import Lowered
from tests.models import packed_batch, randomise, tiny_llama
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.step_cases import assert_gradients, gradients_of, joined

TARGET = tiny_llama(layers=2, hidden=8, vocab=13, heads=2, kv_heads=1)
SIZES = ((1, (1,)), (1, (0, 1)), (1, (3, 2)), (2, (1,)), (2, (4, 0, 3)), (3, (3, 1, 4)))
"""(cp, lengths of documents): in all but the third, dead rows are needed."""


class Draft(nn.Module):
    """Two weights and an embedding around any body."""

    taps = (0,)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.w = nn.Parameter(torch.zeros(8, 8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        h = F.linear(inputs.features, self.w, self.bias)
        result = BODIES[self.name](inputs, h)
        if isinstance(result, sc.DraftOutput):
            return result
        rows = result.reshape(result.shape[0], -1).square().sum(-1)
        keep = inputs.loss_mask | (inputs.positions == inputs.index)
        return sc.DraftOutput(torch.where(keep, rows, 0.0).sum(), keep.sum())


def branch(inputs: sc.DraftInputs, h: Tensor, group: Tensor) -> Tensor:
    q, k = h.view(-1, 2, 4), (0.5 * h).view(-1, 2, 4)
    return sc.branch_attention(
        q,
        k,
        k,
        [(k * 2, k + 1, group, group)],
        q_limit=inputs.index,
        q_document=inputs.document,
        k_document=inputs.document,
    )


def main(inputs: sc.DraftInputs, h: Tensor, limit: Tensor) -> Tensor:
    """The whole packed row as one document."""
    q, k = h.view(-1, 2, 4), (h - 0.5).view(-1, 2, 4)
    one = torch.zeros_like(inputs.document)
    return sc.branch_attention(q, k, k, q_limit=limit, q_document=one, k_document=one)


def windowed(inputs: sc.DraftInputs, h: Tensor) -> Tensor:
    q, one = h.view(-1, 2, 4), torch.zeros_like(inputs.document)
    limit = torch.full_like(inputs.index, inputs.tokens.shape[0] + 1)
    return sc.branch_attention(q, q, q, q_limit=limit, q_document=one, k_document=one, window=4)


def shifted(inputs: sc.DraftInputs, h: Tensor) -> Tensor:
    one = torch.zeros_like(inputs.document)
    ids = [sc.shift(x + 1, k, one) for x in (inputs.index, inputs.positions) for k in (1, -2)]
    return torch.cat(
        [sc.shift(h, 1, one), sc.shift(h, -2, one), h * torch.stack(ids, -1).sum(-1, True)], -1
    )


def all_rows(inputs: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    """Sums of every kind, without a mask."""
    ones = torch.ones(h.shape[0], dtype=h.dtype)
    loss = h.square().sum() + h.exp().sum(0).square().sum() + torch.einsum("td->d", h.sin()).prod()
    loss = loss + (h.view(-1, 4) * 3).square().sum() + h[:, None].cos().sum((0, 1)).sum()
    loss = (
        loss + torch.full((h.shape[0],), 0.5, dtype=h.dtype).sum() * h.sum() + ones.sum() * h.sum()
    )
    count = (
        ones.sum()
        + inputs.index.sum()
        + (inputs.positions == 0).sum()
        + torch.count_nonzero(inputs.document + 1)
    )
    return sc.DraftOutput(loss, count)


def summed_losses(inputs: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    label = inputs.tokens % 8
    loss = F.cross_entropy(h, label, reduction="sum", label_smoothing=0.1)
    loss = loss + F.mse_loss(h, inputs.features, reduction="sum")
    loss = loss + F.kl_div(
        h.log_softmax(-1), inputs.features.log_softmax(-1), reduction="sum", log_target=True
    )
    return sc.DraftOutput(loss, inputs.tokens.new_ones(inputs.tokens.shape[0]).sum())


def numbers(inputs: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    """The number of rows as a number, of every spelling."""
    total = h.shape[0]
    left = (total - inputs.index)[:, None]
    loss = (h * left).square().sum() / total + (h / total**0.5).sum() - 3.0 / (1 + total) * h.sum()
    loss = loss + h.sum() / h.numel() + (h * torch.full((total, 1), total)).sum()
    loss = loss + (h * (torch.arange(total, dtype=h.dtype)[:, None] / total)).sum()
    loss = loss + (h * (inputs.index == total - 1)[:, None]).sum() / torch.tensor(total)
    loss = loss + (h * torch.arange(1, total + 1)[:, None]).sum() / max(total, 3)
    return sc.DraftOutput(loss, torch.full((), total))


def divisions(inputs: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    """Finite on every live row alone: neither inf nor nan of another may reach a sum or a gradient."""
    total = h.shape[0]
    left = total - torch.arange(total, dtype=h.dtype)
    loss = (h / (total - inputs.index)[:, None]).sum() + (h / left[:, None]).sin().sum()
    loss = loss + (h.square().sum(-1) / left).sqrt().sum()
    return sc.DraftOutput(loss, total - inputs.index.sum() / total)


def tables(inputs: sc.DraftInputs, h: Tensor) -> Tensor:
    """Tables that are just long enough."""
    return h * (1 + torch.arange(8)[inputs.index] + torch.arange(3)[inputs.document])[:, None]


def everything(inputs: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    total = inputs.tokens.shape[0]
    h = branch(inputs, h, inputs.positions).flatten(1)
    h = h + main(inputs, h, torch.full_like(inputs.index, total)).flatten(1)
    h = h + sc.shift(h, 1, torch.zeros_like(inputs.document))
    rows = h.square().sum(-1) / (total - inputs.index)
    return sc.DraftOutput(rows.sum() / total, torch.ones_like(rows).sum())


def plain_sums(inputs: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    return sc.DraftOutput(h.square().sum(), torch.full((), h.shape[0]))


BODIES: dict[str, Callable[[sc.DraftInputs, Tensor], Any]] = {
    "groups by positions": lambda i, h: branch(i, h, i.positions),
    "groups by zeros": lambda i, h: branch(i, h, torch.zeros_like(i.tokens)),
    "groups by tokens": lambda i, h: branch(i, h, i.tokens % 2),
    "shifts": shifted,
    "limit of all rows": lambda i, h: main(i, h, torch.full_like(i.index, h.shape[0])),
    "limit far behind the rows": lambda i, h: main(i, h, i.index + 1000),
    "window at the end": windowed,
    "numbers": numbers,
    "divisions": divisions,
    "sums": all_rows,
    "summed losses": summed_losses,
    "tables": tables,
    "plain sums": plain_sums,
    "everything": everything,
}


QUICK = ("groups by zeros", "everything")
"""Bodies that every run tries on three ranks; the others in the slow tests."""


@functools.lru_cache(maxsize=64)
def lowered_for(name: str, plan: Plan) -> tuple[nn.Module, Lowered]:
    draft = randomise(Draft(name).double(), 3)
    return draft, lower(TARGET, draft, plan)


def check(name: str, lengths: tuple[int, ...], **plan: Any) -> None:
    """Loss and gradients are the dense step's, to fp64 precision."""
    torch.set_num_threads(1)
    micro_batches = plan.pop("micro_batches", 1)
    draft, lowered = lowered_for(name, Plan(**plan, verify=False))
    lowered = dataclasses.replace(lowered, plan=Plan(**plan, micro_batches=micro_batches))
    batch = packed_batch(lengths, vocab=13)
    wanted = dense_step(TARGET, draft, batch, None)
    assert torch.isfinite(torch.tensor(wanted.draft_loss))

    def body(model: ParallelModel, rank: int) -> Any:
        return model.step(batch, None).draft_loss, gradients_of(model)

    outcomes = run_lowered(lowered, TARGET, draft, body)
    for loss, _ in outcomes:
        assert loss == pytest.approx(wanted.draft_loss, rel=1e-10, abs=1e-12)
    assert_gradients([grads for _, grads in outcomes], joined(wanted), tolerance=1e-9)


@pytest.mark.parametrize(
    ("cp", "name"),
    [
        pytest.param(cp, name, marks=[pytest.mark.slow] if cp != 2 and name not in QUICK else [])
        for cp in (1, 2, 3)
        for name in BODIES
    ],
)
def test_a_step_with_dead_rows_equals_the_dense_step(cp: int, name: str) -> None:
    for size, lengths in SIZES:
        if size == cp:
            check(name, lengths, cp=cp)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_a_step_with_dead_rows_on_two_stages_equals_the_dense_step(strategy: str) -> None:
    check("everything", (4, 0, 3), cp=2, pp=2, cp_strategy=strategy)


@pytest.mark.parametrize("name", ["everything", "numbers", "divisions"])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_micro_batch_without_tokens_adds_nothing(name: str, cp: int) -> None:
    """0 / 0 in the graph's numbers for it."""
    check(name, (5,), cp=cp, micro_batches=3)


@pytest.mark.parametrize("name", ["divisions", "numbers"])
def test_a_data_parallel_rank_without_tokens_adds_nothing(name: str) -> None:
    draft, lowered = lowered_for(name, Plan(dp=2, verify=False))
    given = [packed_batch((3, 2), vocab=13), packed_batch((), vocab=13)]
    wanted = dense_step(TARGET, draft, given[0], None)

    def body(model: ParallelModel, rank: int) -> Any:
        return model.step(given[model.dp_rank], None).draft_loss, gradients_of(model)

    outcomes = run_lowered(lowered, TARGET, draft, body)
    for loss, _ in outcomes:
        assert loss == pytest.approx(wanted.draft_loss, rel=1e-10)
    assert_gradients([grads for _, grads in outcomes], joined(wanted), tolerance=1e-9)


def test_sums_over_rows_do_not_depend_on_micro_batches() -> None:
    for micro_batches in (1, 2, 4):
        check("plain sums", (3, 1, 1), cp=2, micro_batches=micro_batches)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("lengths", [(1,), ()])
def test_the_draft_loss_of_a_loop_that_owns_the_loss_equals_the_dense_one(
    lengths: tuple[int, ...], cp: int
) -> None:
    draft, lowered = lowered_for("numbers", Plan(cp=cp, verify=False))
    batch = packed_batch(lengths, vocab=13)
    wanted = dense_step(TARGET, draft, batch, None) if lengths else None

    def body(model: ParallelModel, rank: int) -> tuple[float, float, dict[str, Any]]:
        loss = model(batch).draft_loss
        assert loss is not None
        loss.backward()
        model.finalize_grads()
        grads = {k: v for k, v in gradients_of(model).items() if k.startswith("draft")}
        return float(loss.detach()), model.evaluate(batch).draft_loss, grads

    outcomes = run_lowered(lowered, TARGET, draft, body)
    for loss, evaluated, _ in outcomes:
        expected = wanted.draft_loss if wanted is not None else 0.0
        assert (loss, evaluated) == pytest.approx((expected, expected), rel=1e-10, abs=1e-12)
    if wanted is not None:
        grads = {f"draft.{k}": v for k, v in wanted.draft_grads.items()}
        assert_gradients([o[2] for o in outcomes], grads, tolerance=1e-9)

"""Plain spellings of a shift of rows are one node, exact on any ranks; what is near to one is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import Plan
from spec_compile.capture.trace import capture
from spec_compile.errors import PlanError
from tests.analysis.row_bodies import (
    TARGET,
    Expression,
    draft_of,
    lower_expression,
    masked,
    total,
    worst_difference,
)


def padding(x: Tensor, *, left: bool) -> Tensor:
    """Shift a batch [1, T] by one, as drafts of other projects do."""
    zero = torch.zeros_like(x[:, -1:])
    return torch.cat((zero, x[:, :-1]) if left else (x[:, 1:], zero), dim=1)


SHIFTS: dict[str, tuple[Expression, list[int]]] = {
    "roll": (lambda m, i, h: torch.roll(h, 3, 0), [-3]),
    "roll of two dimensions": (lambda m, i, h: h.roll((-2, 1), (0, 1)), [2]),
    "roll of ids": (lambda m, i, h: h * (1 + i.tokens.roll(1))[:, None], [-1]),
    "pad behind": (lambda m, i, h: F.pad(h[1:], (0, 0, 0, 1)), [1]),
    "pad before": (lambda m, i, h: F.pad(h[:-4], (0, 0, 4, 0)), [-4]),
    "pad with a value": (lambda m, i, h: h * F.pad(i.tokens[1:], (0, 1), value=-100)[:, None], [1]),
    "pad, then slice": (lambda m, i, h: F.pad(h, (0, 0, 2, 0))[:-2], [-2]),
    "negative pad": (lambda m, i, h: F.pad(h, (0, 0, -1, 1)), [1]),
    "pad where nothing moves": (lambda m, i, h: F.pad(h[1:], (0, 0, 1, 0)), [1, -1]),
    "pad on both sides": (lambda m, i, h: F.pad(h[3:-1], (0, 0, 2, 2), value=0.5), [-1, 4, -2]),
    "pad of columns too": (lambda m, i, h: F.pad(h[1:], (1, 2, 0, 1)), [1]),
    "zeros behind": (lambda m, i, h: torch.cat([h[2:], h.new_zeros(2, 8)]), [2]),
    "zeros before": (lambda m, i, h: torch.cat([torch.zeros(1, 8).to(h), h[:-1]]), [-1]),
    "zeros like the rest": (lambda m, i, h: torch.cat([torch.zeros_like(h[:1]), h[:-1]]), [-1]),
    "zeros like all": (lambda m, i, h: torch.cat([torch.zeros_like(h)[:1], h[:-1]]), [-1]),
    "cat, then slice": (lambda m, i, h: torch.cat([h.new_zeros(1, 8), h])[:-1], [-1]),
    "rows joined ahead": (lambda m, i, h: torch.cat([h[1:], h[:1]]), [1]),
    "rows joined back": (lambda m, i, h: torch.cat([h[-2:], h[:-2]], dim=0), [-2]),
    "labels": (lambda m, i, h: h * torch.cat([i.tokens[1:], i.tokens.new_full((1,), 7)])[:, None], [1]),
    "masks": (lambda m, i, h: h * torch.cat([i.loss_mask[1:], i.loss_mask[:1]]).to(h)[:, None], [1]),
    "masks of another type": (lambda m, i, h: h * F.pad(i.loss_mask[2:].double(), (0, 2))[:, None], [2]),
    "a batch dimension": (lambda m, i, h: h * padding(i.tokens[None], left=False)[0][:, None], [1]),
    "rows second": (lambda m, i, h: F.pad(h.T[:, :-1], (1, 0)).T, [-1]),
    "narrow": (lambda m, i, h: F.pad(h.narrow(0, 1, h.shape[0] - 1), (0, 0, 0, 1)), [1]),
    "slice up to a size": (lambda m, i, h: F.pad(h[1 : i.tokens.shape[0], :4], (0, 0, 0, 1)), [1]),
    "whole slices": (lambda m, i, h: h[:] + h[: h.shape[0]] + h[0:, :], []),
}  # fmt: skip


@pytest.fixture(scope="module")
def shifts_found() -> dict[str, list[int]]:
    """What each spelling became, all traced in one draft."""
    found: dict[str, list[int]] = {}

    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        parts = []
        for n, (expression, _) in enumerate(SHIFTS.values()):
            parts.append(expression(m, i, h) * (1000.0 + n))  # a mark in the graph
        return torch.cat(parts, -1)

    k: list[int] = []
    names = list(SHIFTS)
    for node in capture(TARGET, draft_of(body)).graph_module.graph.nodes:
        if node.target == torch.ops.spec_compile.row_shift.default:
            k.append(node.args[1])
        if (
            "aten.mul" in str(node.target)
            and isinstance(node.args[1], float)
            and node.args[1] >= 1000
        ):
            found[names[int(node.args[1]) - 1000]], k = k, []
    return found


@pytest.mark.parametrize("name", SHIFTS)
def test_a_spelling_of_a_shift_is_one_node(name: str, shifts_found: dict[str, list[int]]) -> None:
    assert shifts_found[name] == SHIFTS[name][1]


@pytest.mark.parametrize(
    ("cp", "lengths"), [(1, (7, 1, 5, 4)), (2, (7, 1, 5, 4)), (3, (7, 1, 5, 3)), (2, (6, 1))]
)
def test_spelled_shifts_are_exact_with_their_gradients(cp: int, lengths: tuple[int, ...]) -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
        weights = torch.linspace(0.5, 2.0, 8).to(h)
        loss = sum(
            masked(((e(m, i, h).sum(-1) - 0.3 * n) ** 2) * weights[n % 8], i)
            for n, (e, _) in enumerate(SHIFTS.values())
        )
        return total(torch.as_tensor(loss), i)

    assert worst_difference(body, cp=cp, lengths=lengths) < 1e-9


def test_rows_fewer_than_the_distance_are_those_of_one_device() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        return torch.cat([h.roll(3, 0), torch.cat([h[3:], h[:3]]), torch.cat([h[-4:], h[:-4]])], -1)

    for lengths in ((2,), (1, 1, 1)):
        assert worst_difference(body, cp=2, lengths=lengths) < 1e-9


def recurrent(m: Any, h: Tensor) -> Tensor:
    out: Tensor = m.gru(h[None])[0][0]
    return out


NEAR: dict[str, Expression] = {
    "slice alone": lambda m, i, h: total(h[1:].sum(), i),
    "pairs of neighbours": lambda m, i, h: total((h[1:] * h[:-1]).sum(), i),
    "loss of a slice": lambda m, i, h: total(
        F.cross_entropy(h[:-1], i.tokens[1:], reduction="sum"), i
    ),
    "more rows than were cut": lambda m, i, h: torch.cat([h[1:], h[:2]]),
    "rows of another tensor": lambda m, i, h: torch.cat([h[1:], (h * 2)[:1]]),
    "a learned first row": lambda m, i, h: torch.cat([m.vec[None], h[:-1]]),
    "rows in another order": lambda m, i, h: torch.cat([h[:1], h[1:]]) + torch.cat([h[-1:], h[1:]]),
    "zeros that were written to": lambda m, i, h: torch.cat(
        [h.new_zeros(1, 8).add_(m.vec), h[:-1]]
    ),
    "reflected padding": lambda m, i, h: F.pad(h.T[None], (1, 0), mode="reflect")[0].T[:-1],
    "a computed distance": lambda m, i, h: h.roll(h.shape[0] // 2, 0),
    "a tensor as distance": lambda m, i, h: F.pad(h[i.tokens[0] :], (0, 0, 0, 1)),
    "every second row": lambda m, i, h: total(h[::2].sum(), i),
    "one row": lambda m, i, h: h - h[5],
    "chunk": lambda m, i, h: h.chunk(2, 0)[0].sum() * h,
    "split": lambda m, i, h: h.split(3)[0].sum() * h,
    "unfold": lambda m, i, h: h.unfold(0, 2, 1).sum() * h,
    "cdist": lambda m, i, h: torch.cdist(h, h).sum() * h,
    "gru": lambda m, i, h: recurrent(m, h),
    "fft": lambda m, i, h: torch.fft.fft(h, dim=0).real,
    "a branch on the number of rows": lambda m, i, h: h * 2 if h.shape[0] > 10 else h,
    "a branch on its parity": lambda m, i, h: h * 2 if h.shape[0] % 2 else h,
}


QUICK = {
    "slice alone",
    "more rows than were cut",
    "a learned first row",
    "gru",
    "a branch on the number of rows",
}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NEAR]
)
def test_what_is_near_a_shift_is_refused_with_its_line_and_a_way_out(name: str) -> None:
    draft = draft_of(NEAR[name])
    draft.gru = torch.nn.GRU(8, 8, batch_first=True).double()
    with pytest.raises(PlanError, match=r"sc\.shift") as caught:
        sc.lower(TARGET, draft, Plan(cp=2, verify=False))
    assert "test_row_spellings.py:" in str(caught.value)


def test_a_helper_that_reads_a_slice_names_the_line_that_cut_it() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Any:
        return h[1:]

    with pytest.raises(
        PlanError, match=r"cut at .*test_row_spellings.py:\d+ in body: return h\[1:\]"
    ):
        lower_expression(body)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_shift_over_borders_is_warned_of_where_documents_are_dealt(
    micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    draft = draft_of(lambda m, i, h: torch.roll(h, 3, 0) + F.pad(h[1:], (0, 0, 0, 1)))
    plan = Plan(micro_batches=micro_batches, verify=False)
    notes = sc.lower(TARGET, draft, plan).facts.notes
    told = [r.getMessage() for r in caplog.records if "document borders" in r.getMessage()]
    assert len(told) == (micro_batches > 1)
    assert list(notes) == told
    assert all("test_row_spellings.py:" in line for line in told)

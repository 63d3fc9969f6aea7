"""A mask that asks for numbers of documents, anchors or slots is recognised exactly or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from spec_compile.analysis.mask_forms import Form, Main, Segment, find_forms
from spec_compile.analysis.row_rules import Refusal

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of index, positions, document and anchors."""

QUICK = (
    "the first 10", "the first 30 keys", "remainder", "or early rows of many", "between", "its own rows", "padding",
    "from 1", "changes", "late rows of late documents", "slots", "blocks", "late rows",
)  # fmt: skip


def cells(masks: dict[str, Mask]) -> list[Any]:
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in masks]


class Masked(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(
        self, index: Tensor, positions: Tensor, document: Tensor, anchors: Tensor
    ) -> Tensor:
        return self.mask(index, positions, document, anchors)


def captured(mask: Mask) -> GraphModule:
    rows, anchors = torch.export.Dim("rows", min=4), torch.export.Dim("anchors", min=2)
    index = torch.arange(19)
    inputs = (index, index.clone(), index // 7, torch.tensor([0, 3, 5, 9, -1]))
    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: anchors})
    program = torch.export.export(Masked(mask), inputs, dynamic_shapes=shapes, strict=False)
    return program.module(check_guards=False)


def form(mask: Mask, *, each: int = 0) -> Form:
    """Of main keys; ``each`` slots an anchor are queries, or all rows."""
    gm = captured(mask)
    (result,) = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    queries = Segment(True, each) if each else Segment(False, 1)
    return find_forms(gm, result, [queries], [Segment(False, 1)], causal=False)[0][0]


def steps(extra: Mask, *, near: int = 4) -> Mask:
    """Rows see the rows before them in their document, those far away only where ``extra`` holds."""

    def mask(index: Tensor, positions: Tensor, document: Tensor, anchors: Tensor) -> Tensor:
        far = index[:, None] - index[None]
        base = (far >= 0) & (document[:, None] == document[None])
        return base & ((far < near) | extra(index, positions, document, anchors))

    return mask


def count(positions: Tensor) -> Tensor:
    """How many documents have begun, [T, 1]."""
    return (positions == 0).cumsum(0)[:, None]


NUMBERED: dict[str, Mask] = {
    "the first 10": lambda i, p, d, a: d[:, None] < 10,
    "the first 40": lambda i, p, d, a: d[:, None] < 40,
    "the first 18": lambda i, p, d, a: d[:, None] < 18,
    "the first 30 keys": lambda i, p, d, a: d[None] < 30,
    "remainder": lambda i, p, d, a: d[:, None] % 32 < 31,
    "quotient": lambda i, p, d, a: d[:, None] // 16 < 3,
    "or early rows": lambda i, p, d, a: (d < 8)[:, None] | (p < 8)[:, None],
    "or early rows of many": lambda i, p, d, a: (d < 12)[:, None] | (p < 30)[:, None],
    "all but one": lambda i, p, d, a: (d != 37)[:, None],
    "between": lambda i, p, d, a: ((d < 37) | (d > 37))[:, None],
    "clamped": lambda i, p, d, a: (d.clamp(36, 38)[:, None] - d[None]) >= 0,
    "with rows": lambda i, p, d, a: d[:, None] <= i[None],
    "joined with rows": lambda i, p, d, a: torch.cat([d, i])[: d.shape[0], None] == d[None],
    "as truth": lambda i, p, d, a: d.bool()[:, None],
    "second difference": lambda i, p, d, a: torch.diff(d, 2, prepend=d[:2])[:, None] == 0,
    "as rows": lambda i, p, d, a: p[d][:, None] == 0,
    "its own rows": lambda i, p, d, a: d[d][:, None] == d[None],
    "neighbours": lambda i, p, d, a: d[:, None] + 1 == d[None],
}


@pytest.mark.parametrize("name", cells(NUMBERED))
def test_numbers_of_documents_are_compared_with_each_other_only(name: str) -> None:
    with pytest.raises(Refusal, match="asks more of numbers of documents than"):
        form(steps(NUMBERED[name]))


SAME: dict[str, Mask] = {
    "difference": lambda i, p, d, a: (d[:, None] - d[None]).abs() == 0,
    "none": lambda i, p, d, a: ~(d[:, None] - d[None]).bool(),
    "not below 0": lambda i, p, d, a: (d[:, None] == d[None]) & (d >= 0),
    "padding": lambda i, p, d, a: d[:, None] == torch.where(i >= 0, d, -1),
    "from 1": lambda i, p, d, a: ((d + 1)[:, None] == ((d + 1) * (i >= 0))) & (d + 1 > 0),
    "not another": lambda i, p, d, a: (d[:, None] <= d) & (d[:, None] >= d),
    "beginnings": lambda i, p, d, a: count(p) == count(p).squeeze(1),
    "changes": lambda i, p, d, a: (
        (d != torch.cat([d.new_full((1,), -1), d[:-1]])).cumsum(0)[:, None] == count(p).squeeze(1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cells(SAME))
def test_a_document_is_told_apart_in_any_way_that_takes_no_number(name: str) -> None:
    def mask(index: Tensor, *others: Tensor) -> Tensor:
        return (index[:, None] >= index) & SAME[name](index, *others)

    assert form(mask) == Main("index + 1", documents=True)


COUNTED: dict[str, Mask] = {
    "many documents": lambda i, p, d, a: count(p) <= 12,
    "late rows of late documents": lambda i, p, d, a: (count(p) <= 12) | (p < 30)[:, None],
    "late keys of late documents": lambda i, p, d, a: (count(p) <= 8) | (p < 8),
    "late rows of early documents": lambda i, p, d, a: (count(p) > 12) | (p < 30)[:, None],
    "documents left": lambda i, p, d, a: (
        ((p == 0).flip(0).cumsum(0).flip(0) < 12) | (p < 30)
    )[:, None],
    "rows left": lambda i, p, d, a: ((i.shape[0] - i < 40) | (p < 20))[:, None],
    "rows left after many documents": lambda i, p, d, a: (
        (i.shape[0] - i < 20)[:, None] | (p < 20)[:, None] | (count(p) < 20)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cells(COUNTED))
def test_what_begins_after_many_documents_is_seen(name: str) -> None:
    with pytest.raises(Refusal, match="another form"):
        form(steps(COUNTED[name]))


def blocks(extra: Mask, *, each: int = 2) -> Mask:
    """Slots see the rows up to their anchor in its document where ``extra`` holds, [A * each, 1]."""

    def mask(index: Tensor, positions: Tensor, document: Tensor, anchors: Tensor) -> Tensor:
        at = anchors.repeat_interleave(each)[:, None]
        own = document[anchors.clamp_min(0)].repeat_interleave(each)[:, None]
        base = (index <= at) & (document == own)
        return base & extra(index, positions, document, anchors)

    return mask


SLOTTED: dict[str, Mask] = {
    "slots": lambda i, p, d, a: torch.arange(2 * a.shape[0])[:, None] < 60,
    "slots of many": lambda i, p, d, a: torch.arange(2 * a.shape[0])[:, None] < 300,
    "blocks": lambda i, p, d, a: torch.arange(a.shape[0]).repeat_interleave(2)[:, None] < 24,
    "expanded": lambda i, p, d, a: (
        torch.arange(a.shape[0])[:, None].expand(-1, 2).reshape(-1)[:, None] < 24
    ),
    "quotient": lambda i, p, d, a: torch.arange(2 * a.shape[0])[:, None] // 2 < 24,
    "used": lambda i, p, d, a: (a >= 0).cumsum(0).repeat_interleave(2)[:, None] < 24,
    "late rows": lambda i, p, d, a: (
        ((torch.arange(a.shape[0]) < 24) | (p[a.clamp_min(0)] < 30)).repeat_interleave(2)[:, None]
    ),
    "late rows of few": lambda i, p, d, a: (
        ((torch.arange(a.shape[0]) > 24) | (p[a.clamp_min(0)] < 30)).repeat_interleave(2)[:, None]
    ),
    "many anchors": lambda i, p, d, a: (a[:1] * 0 + a.shape[0] < 40)[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", cells(SLOTTED))
def test_what_begins_after_many_anchors_is_seen(name: str) -> None:
    with pytest.raises(Refusal, match="another form"):
        form(blocks(SLOTTED[name]), each=2)


@pytest.mark.slow
def test_blocks_that_count_their_slots_are_recognised() -> None:
    def counted(index: Tensor, positions: Tensor, document: Tensor, anchors: Tensor) -> Tensor:
        return torch.arange(8 * anchors.shape[0])[:, None] % 8 < 8

    assert form(blocks(counted, each=8), each=8) == Main("anchor + 1", documents=True)


def test_more_slots_than_can_be_tried_are_refused() -> None:
    def late(index: Tensor, positions: Tensor, document: Tensor, anchors: Tensor) -> Tensor:
        number = torch.arange(anchors.shape[0]) // 2 < 62
        return number[:, None].expand(-1, 16).reshape(-1)[:, None]

    with pytest.raises(Refusal, match="slot 1984 of all anchors, too far to try"):
        form(blocks(late, each=16), each=16)

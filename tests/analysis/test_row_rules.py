"""Nothing that looks across rows passes the locality check, and what stays in its row is exact."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile.errors import CaptureError, PlanError

from .row_bodies import Expression, RowDraft, lower_expression, masked, total, worst_difference

NON_LOCAL: dict[str, Expression] = {
    "mean": lambda m, i, h: h - h.mean(0),
    "cumsum": lambda m, i, h: h.cumsum(0),
    "count by cumsum of ids": lambda m, i, h: h * i.loss_mask.long().cumsum(0)[:, None],
    "flip": lambda m, i, h: h.flip(0),
    "softmax": lambda m, i, h: h.softmax(0),
    "roll over all dimensions": lambda m, i, h: torch.roll(h, 1),
    "sort": lambda m, i, h: h.sort(0)[0],
    "argmax": lambda m, i, h: h * h.argmax(0),
    "index by rows": lambda m, i, h: h[i.index],
    "first row": lambda m, i, h: h - h[0],
    "pairs of rows": lambda m, i, h: (h[:, None] - h[None]).square().sum(1),
    "gram matrix": lambda m, i, h: F.linear(h, h).sum(-1),
    "second moment": lambda m, i, h: h @ (h.T @ h),
    "einsum of pairs": lambda m, i, h: torch.einsum("td,sd->t", h, h),
    "einsum to a number": lambda m, i, h: torch.einsum("td,td->", h, h) * h,
    "einsum over rows": lambda m, i, h: torch.einsum("td,te->de", h, h).sum() * h,
    "matrix norm": lambda m, i, h: h / torch.linalg.matrix_norm(h),
    "norm": lambda m, i, h: h / h.norm(),
    "var_mean": lambda m, i, h: h - torch.var_mean(h, 0)[1],
    "std": lambda m, i, h: h / h.std(),
    "max": lambda m, i, h: h / h.amax(),
    "any": lambda m, i, h: h * (h > 0).any(),
    "prod": lambda m, i, h: h * h.prod(0),
    "diff": lambda m, i, h: torch.diff(h, dim=0, prepend=h[:1]),
    "topk": lambda m, i, h: h.topk(2, 0)[0].sum() * h,
    "narrow": lambda m, i, h: h.narrow(0, 0, 2).sum() * h,
    "scatter": lambda m, i, h: h.scatter(0, i.index[:, None].expand(-1, 8), h),
    "bucketize by rows": lambda m, i, h: (
        h * torch.bucketize(h[:, 0], i.positions.double())[:, None]
    ),
    "rows as a table": lambda m, i, h: F.embedding(i.tokens, h),
    "segment sum": lambda m, i, h: h.new_zeros(64, 8).index_add(0, i.document, h)[i.document],
    "boolean index": lambda m, i, h: total(h[i.loss_mask].sum(), i),
    "masked_select": lambda m, i, h: h.masked_select(i.loss_mask[:, None]).sum() * h,
    "cat along rows, cut inside": lambda m, i, h: torch.cat([h, h], 0)[1 : h.shape[0] + 1],
    "repeat of rows, two a row": lambda m, i, h: total(
        h.repeat(2, 1).view(-1, 2, 8).sum(1).square().sum(), i
    ),
    "pad of rows": lambda m, i, h: total(F.pad(h, (0, 0, 1, 0)).square().sum(), i),
    "unfold": lambda m, i, h: total(h.unfold(0, 2, 2).sum(), i),
    "transposed view": lambda m, i, h: total(h.T.reshape(2, -1).cumsum(1).sum(), i),
    "conv1d": lambda m, i, h: F.conv1d(h.T[None], m.w[:, :, None])[0].T,
    "batch_norm": lambda m, i, h: F.batch_norm(h, None, None, training=True),
    "normalize": lambda m, i, h: F.normalize(h, dim=0),
    "cosine of pairs": lambda m, i, h: F.cosine_similarity(h[:, None], h[None], -1).sum(-1),
    "baddbmm": lambda m, i, h: torch.baddbmm(h[None], h[None], (h.T @ h)[None])[0],
    "square of the row count": lambda m, i, h: (
        h * m.vec[:1].expand(h.shape[0], h.shape[0]).sum(-1)[:, None]
    ),
    "loss against a broadcast": lambda m, i, h: total(
        F.kl_div(m.vec.log_softmax(-1), h.softmax(-1), reduction="sum"), i
    ),
    "loss over rows as classes": lambda m, i, h: total(
        F.cross_entropy(h[:, 0], h[:, 1].sigmoid(), reduction="sum"), i
    ),
    "loss against other rows": lambda m, i, h: total(
        F.kl_div(h[:, :1], h[:, 0].sigmoid(), reduction="sum"), i
    ),
    "mean loss": lambda m, i, h: total(F.cross_entropy(h, i.tokens % 8), i),
    "rows as a head": lambda m, i, h: sc.soft_cross_entropy(h, h * 2, h, h * 3)[0],
    "learned keys": lambda m, i, h: learned_keys(m, i, h),
    "arange from the last row": lambda m, i, h: h * torch.arange(h.shape[0] - 1, -1, -1)[:, None],
    "linspace": lambda m, i, h: h * torch.linspace(0, 1, h.shape[0])[:, None],
    "number of a sum": lambda m, i, h: total(masked(h.sum(-1), i) * masked(h[:, 0], i).item(), i),
    "undeclared attention": lambda m, i, h: F.scaled_dot_product_attention(
        h[None], h[None], h[None], h[:, 0].gt(0).expand(h.shape[0], -1)
    )[0],
}


def learned_keys(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    q, group = h[:, None], torch.zeros(3, dtype=torch.long)
    branch = (m.keys, m.keys, group, torch.zeros_like(i.index))
    return sc.branch_attention(
        q, q, q, [branch], q_limit=i.index, q_document=i.document, k_document=i.document
    )


QUICK = {
    "mean", "roll over all dimensions", "first row", "pairs of rows", "gram matrix", "rows as a head",
    "square of the row count", "loss against a broadcast", "loss against other rows", "learned keys",
    "number of a sum", "scatter", "count by cumsum of ids", "undeclared attention", "linspace",
    "arange from the last row",
}  # fmt: skip


def slow_but(names: Iterable[str], quick: set[str]) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_but(NON_LOCAL, QUICK))
def test_what_looks_across_rows_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        lower_expression(NON_LOCAL[name])
    assert Path(__file__).name in str(caught.value) or "row_bodies.py" in str(caught.value)


def part_of_a_tensor(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    y = h.new_zeros(h.shape[0], 8)
    y[:, :3] = h[:, :3]
    return y


def view_of_a_tensor(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    y = (h * 1).view(-1, 2, 4)
    y[:, 0].mul_(2)
    return y


def parameter_in_place(m: RowDraft, i: sc.DraftInputs, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.vec.add_(1)
    return h * m.vec


@pytest.mark.parametrize("body", [part_of_a_tensor, view_of_a_tensor, parameter_in_place])
def test_writes_that_cannot_be_made_values_are_refused(body: Expression) -> None:
    with pytest.raises(CaptureError, match=r"in place|part of a tensor"):
        lower_expression(body)


@pytest.mark.parametrize("body", [lambda m, i, h: h * len(h), lambda m, i, h: h + sum(h)])
def test_len_of_rows_and_loops_over_them_are_refused_with_their_line(body: Expression) -> None:
    with pytest.raises(CaptureError, match=r"test_row_rules.py:\d+.*\n.*shape\[0\]"):
        lower_expression(body)


@pytest.mark.parametrize("which", ["loss_sum", "count"])
def test_an_output_with_one_entry_a_row_is_refused(which: str) -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
        loss, count = h.sum(-1), i.loss_mask.long()
        return sc.DraftOutput(loss if which == "loss_sum" else loss.sum(), count)

    with pytest.raises(CaptureError, match=f"{which} has one entry a row"):
        lower_expression(body)


def in_place(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    y = h * 2
    y += 1
    y *= h
    return y


def in_place_on_constants(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    a, b = h.new_zeros(h.shape[0], 8), h.new_zeros(h.shape[0], 8)
    a.add_(h)
    b.add_(1.0)
    return a * 3 + b


def loss_in_place(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    loss = h.new_zeros(())
    for k in range(2):
        loss += masked(h.sum(-1) * k, i) + 1
    return total(loss, i)


def documents_as_groups(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    q, k = h.view(-1, 2, 4), (h * 2).view(-1, 2, 4)
    branch = (k * 0.5, k, i.document, i.document)
    return sc.branch_attention(
        q, k, k, [branch], q_limit=i.index, q_document=i.document, k_document=i.document
    )


def flat_labels(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    labels = torch.stack([sc.shift(i.tokens, k, i.document) for k in (1, 2)], 1)
    logits = torch.stack([h.repeat(1, 2), h.repeat(1, 2) * 2], 1)
    loss = F.cross_entropy(logits.view(-1, 16), labels.view(-1), reduction="none")
    return loss.view(-1, 2)


def squared(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    """One sum in both places of a product or a quotient, and beside what is made of it."""
    q, other = masked(h[:, 0], i), masked(h[:, 1].abs(), i)
    return (
        q * q + other * (q / (q + 1)) + other / other + q * (2 * q).exp().neg() + q.mul(q.detach())
    )


def rotary(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    angle = torch.outer(i.positions.double(), torch.arange(8).double())
    return torch.cat([-h[..., 4:], h[..., :4]], -1) * angle.sin() + h * angle.cos()


LOCAL: dict[str, Expression] = {
    "cat along rows": lambda m, i, h: torch.cat([h, h], 0)[: h.shape[0]],
    "repeat of rows": lambda m, i, h: total(h.repeat(2, 1).square().sum(), i),
    "merged view": lambda m, i, h: F.linear(h.view(-1, 4), m.w[:, :4]).view(-1, 16),
    "sizes from shape": lambda m, i, h: h.reshape(h.shape[0] * 2, 4).reshape(h.shape[0], -1),
    "mT": lambda m, i, h: h.view(-1, 2, 4).mT.flatten(1) + h.mT.sin().mT,
    "einsum to a number": lambda m, i, h: h * torch.einsum("td->", h),
    "einsum": lambda m, i, h: torch.einsum("thd,hde->the", h.view(-1, 2, 4), m.w.view(2, 4, 8)),
    "norms": lambda m, i, h: m.norm(h) + F.rms_norm(h, (8,), m.vec) + F.normalize(h, dim=-1),
    "gather": lambda m, i, h: h.log_softmax(-1).gather(-1, (i.tokens % 8)[:, None]),
    "summed cross_entropy": lambda m, i, h: total(
        F.cross_entropy(h.repeat(1, 2), torch.where(i.loss_mask, i.tokens, -100), reduction="sum"), i
    ),
    "flat labels": flat_labels,
    "repeat_interleave of heads": lambda m, i, h: h.view(-1, 2, 4).repeat_interleave(2, 1),
    "expand of heads": lambda m, i, h: h.view(-1, 2, 1, 4).expand(h.shape[0], 2, 3, 4).flatten(1, 2),
    "chunk and split": lambda m, i, h: torch.cat([h.chunk(2, -1)[1], h.split([3, 5], -1)[0]], -1),
    "where": lambda m, i, h: torch.where(i.loss_mask[:, None], h, m.vec),
    "zeros and arange": lambda m, i, h: torch.cat(
        [torch.zeros(h.shape[0], 2, dtype=h.dtype), h * torch.arange(h.shape[0])[:, None]], -1
    ),
    "learned vector for every row": lambda m, i, h: m.vec.expand(h.shape[0], 8),
    "learned vector repeated": lambda m, i, h: m.vec.repeat(h.shape[0], 1) * h,
    "table by positions": lambda m, i, h: h + m.table[i.positions] + F.embedding(i.tokens, m.table),
    "masks": lambda m, i, h: (h * (i.positions > 2)[:, None]).masked_fill(i.loss_mask[:, None], 0.5),
    "ratio of sums": lambda m, i, h: total(masked(h[:, 0], i) / (1 - masked(h.abs().sum(-1), i)), i),
    "rows over a sum": lambda m, i, h: h / (1 + masked(h.square().sum(-1), i)),
    "constants beside sums": lambda m, i, h: total(masked(h[:, 0], i) + 1.5 - h.shape[0], i),
    "rounded sum": lambda m, i, h: total(
        masked(h[:, 0], i) * torch.div(masked(h[:, 1], i), 0.3, rounding_mode="floor"), i
    ),
    "square of a sum": lambda m, i, h: total(masked(h[:, 0], i) ** 2 + squared(m, i, h), i),
    "truth of a sum": lambda m, i, h: total(masked(h[:, 0], i) * masked(h[:, 1], i).bool(), i),
    "decay of weights": lambda m, i, h: total(masked(h[:, 0], i) + 0.1 * m.vec.square().sum(), i),
    "one_hot": lambda m, i, h: F.one_hot(i.tokens, 13).double() @ m.table[:13],
    "products": lambda m, i, h: (m.w @ h.T).T + torch.addmm(m.vec, h, m.w) * (h @ m.vec)[:, None],
    "batched product": lambda m, i, h: torch.bmm(
        h.view(-1, 2, 4), m.w[None, :4, :4].expand(h.shape[0], 4, 4)
    ),
    "rotary": rotary,
    "elementwise losses": lambda m, i, h: (
        F.smooth_l1_loss(h, i.features, reduction="none")
        + F.mse_loss(h, i.features, reduction="none")
        + F.kl_div(h.log_softmax(-1), i.features.softmax(-1), reduction="none")
    ),
    "moved dimensions": lambda m, i, h: h.view(-1, 2, 4).movedim(0, 1).permute(1, 0, 2).transpose(0, 1)[1],
    "features": lambda m, i, h: torch.cat(
        [h.cumsum(-1), h.flip(-1), h.roll(1, -1), h.topk(3, -1)[0], F.glu(h), F.pad(h, (1, 2))], -1
    ),
    "cosine with a vector": lambda m, i, h: F.cosine_similarity(h, m.vec[None], -1),
    "shifts": lambda m, i, h: sc.shift(h, -2, i.document) + sc.shift(h, 1, i.document),
    "documents as groups": documents_as_groups,
    "in place": in_place,
    "in place on constants": in_place_on_constants,
    "loss in place": loss_in_place,
}  # fmt: skip


QUICK_LOCAL = {
    "flat labels",
    "ratio of sums",
    "square of a sum",
    "documents as groups",
    "loss in place",
}


def test_many_row_local_spellings_in_one_draft_are_exact_on_two_ranks() -> None:
    """All that give rows, in one graph; each alone in the slow test below."""

    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        made = (expression(m, i, h) for expression in LOCAL.values())
        return torch.cat([r.reshape(r.shape[0], -1) for r in made if isinstance(r, Tensor)], -1)

    assert worst_difference(body) < 1e-9


@pytest.mark.parametrize("name", slow_but(LOCAL, QUICK_LOCAL))
def test_what_stays_in_its_row_is_exact_on_two_ranks(name: str) -> None:
    assert worst_difference(LOCAL[name]) < 1e-9

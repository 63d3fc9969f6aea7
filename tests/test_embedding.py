"""``inputs.embedding`` of ids of any shape, also where the embedding lies on another stage than the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import Plan, lower
from spec_compile.errors import PlanError

from .analysis import row_bodies
from .analysis.row_bodies import Expression, RowDraft, draft_of, masked, total, worst_difference
from .models import tiny_llama

TWO_LAYERS = tiny_llama(layers=2, hidden=8, vocab=13, heads=2, kv_heads=1)
LENGTHS = (7, 1, 5, 4)


class WithIds(RowDraft):
    def __init__(self, expression: Expression) -> None:
        super().__init__(expression)
        self.register_buffer("ids", torch.tensor([7, 2, 4]))


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_bodies, "TARGET", TWO_LAYERS)
    monkeypatch.setattr(row_bodies, "RowDraft", WithIds)


def pair(i: sc.DraftInputs) -> Tensor:
    return torch.stack([i.tokens, sc.shift(i.tokens, 1, i.document)], 1)


def ids_of(m: Any) -> Tensor:
    """Three fixed ids that the draft holds as a buffer."""
    ids: Tensor = m.ids
    return ids


EMBEDDED: dict[str, Expression] = {
    "one id a row": lambda m, i, h: i.embedding(i.tokens),
    "shifted ids": lambda m, i, h: i.embedding(sc.shift(i.tokens, 2, i.document)),
    "rolled ids": lambda m, i, h: i.embedding(i.tokens.roll(1)),
    "several ids a row": lambda m, i, h: i.embedding(pair(i)).sum(1),
    "ids of three dimensions": lambda m, i, h: i.embedding(pair(i)[:, None]).flatten(1)[:, 3:11],
    "rows second": lambda m, i, h: i.embedding(i.tokens[None])[0],
    "several ids a row, flat": lambda m, i, h: i.embedding(pair(i).flatten()).view(-1, 16)[:, 4:12],
    "computed ids": lambda m, i, h: i.embedding((i.tokens * 3 + i.positions) % 13),
    "masked ids": lambda m, i, h: i.embedding(torch.where(i.loss_mask, i.tokens, 5)),
    "one id for all rows": lambda m, i, h: i.embedding(torch.full_like(i.tokens, 4)),
    "a python constant": lambda m, i, h: i.embedding(torch.tensor([5])),
    "a scalar": lambda m, i, h: i.embedding(torch.tensor(5)),
    "a vector": lambda m, i, h: (i.embedding(torch.tensor([5, 1, 2])) * h[:, None]).sum(1),
    "a matrix": lambda m, i, h: i.embedding(torch.tensor([[5, 1], [2, 3]])).sum((0, 1)),
    "a buffer": lambda m, i, h: i.embedding(ids_of(m))[1:].sum(0),
    "a buffer for each row": lambda m, i, h: i.embedding(ids_of(m).expand(h.shape[0], 3)).sum(1),
    "the whole table": lambda m, i, h: F.linear(h, i.embedding(torch.arange(13)))[:, :8],
}  # fmt: skip


def every_one(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
    loss = h.new_zeros(())
    for n, expression in enumerate(EMBEDDED.values()):
        loss = loss + masked((h * expression(m, i, h) - 0.1 * n).square().sum(-1), i)
    return total(loss, i)


@pytest.mark.parametrize(
    ("cp", "pp"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.slow), (2, 2), (3, 2)]
)
def test_embeddings_of_ids_of_any_shape_are_exact(cp: int, pp: int) -> None:
    assert worst_difference(every_one, cp=cp, pp=pp, lengths=LENGTHS) < 1e-9


def test_embeddings_of_any_shape_are_sent_as_one_width_a_row() -> None:
    lowered = lower(TWO_LAYERS, draft_of(every_one), Plan(pp=2, verify=False))
    widths = [tap.width for tap in lowered.facts.tap_values if tap.what == "embedding"]
    assert widths.count(8) >= 8
    assert {16, 24, 32, 13 * 8} <= set(widths)


def test_embedding_of_predicted_ids_is_refused_across_stages_and_exact_on_one() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        return h * i.embedding(h.argmax(-1))

    assert worst_difference(body, cp=2) < 1e-9
    with pytest.raises(PlanError, match=r"test_embedding.py:\d+ in body(.|\n)*inputs\.tokens"):
        lower(TWO_LAYERS, draft_of(body), Plan(pp=2, verify=False))


def test_very_many_fixed_ids_are_refused_across_stages() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        return F.linear(h, i.embedding(torch.arange(39) % 13))

    with pytest.raises(PlanError, match=r"test_embedding.py:\d+ in body(.|\n)*39 fixed ids"):
        lower(TWO_LAYERS, draft_of(body), Plan(pp=2, verify=False))


def test_embedding_gives_no_gradient_to_the_target() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        return h * i.embedding(torch.tensor([5])) + i.embedding(pair(i)).sum(1)

    graphs = lower(TWO_LAYERS, draft_of(body), Plan(pp=2, verify=False)).graphs
    embeddings = [n for n in graphs["stage0"].graph.nodes if "aten.embedding" in str(n.target)]
    assert len(embeddings) == 3
    frozen = [n for n in embeddings if "detach" in str(n.args[0].target)]
    assert len(frozen) == 2

"""What does not fit the declared operators is refused where it is written, plainly run or captured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile.errors import ConfigError, PlanError

from .analysis.row_bodies import lower_expression, worst_difference


def attend(**changes: Any) -> Tensor:
    q, index, document = torch.ones(6, 4, 8), torch.arange(6), torch.zeros(6, dtype=torch.int64)
    given = {"q_limit": index + 1, "q_document": document, "k_document": document, **changes}
    q, k, v, branches = (
        given.pop("q", q),
        given.pop("k", q[:, :2]),
        given.pop("v", q[:, :2]),
        given.pop("branches", ()),
    )
    return sc.branch_attention(q, k, v, branches, **given)


WRONG: dict[str, dict[str, Any]] = {
    "window -1": {"window": -1},
    "window 0": {"window": 0},
    "window of a float": {"window": 2.0},
    "window of a bool": {"window": True},
    "scale nan": {"scale": math.nan},
    "scale inf": {"scale": math.inf},
    "scale of a string": {"scale": "1"},
    "limit of floats": {"q_limit": torch.ones(6)},
    "limit of bools": {"q_limit": torch.ones(6, dtype=torch.bool)},
    "limit too short": {"q_limit": torch.ones(5, dtype=torch.int64)},
    "limit of two dimensions": {"q_limit": torch.ones(6, 1, dtype=torch.int64)},
    "limit as a number": {"q_limit": 3},
    "documents of floats": {"q_document": torch.zeros(6)},
    "too few key documents": {"k_document": torch.zeros(5, dtype=torch.int64)},
    "fewer values than keys": {"v": torch.ones(5, 2, 8)},
    "group too short": {
        "branches": [(torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.arange(2), torch.arange(6))]
    },
    "group of queries too short": {
        "branches": [(torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.arange(3), torch.arange(3))]
    },
    "sinks of another length": {"sinks": torch.ones(3)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_of_attention_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"test_attention_arguments.py:\d+ in attend"):
        attend(**WRONG[name])


def test_numbers_of_any_integer_type_are_taken() -> None:
    index = torch.arange(6, dtype=torch.int32)
    zeros = torch.zeros(6, dtype=torch.int16)
    small = attend(q_limit=index + 1, q_document=zeros, k_document=zeros, window=2, scale=1)
    assert torch.equal(small, attend(window=2, scale=1.0))


@pytest.mark.parametrize(
    ("k", "document"),
    [(1.0, torch.zeros(6, dtype=torch.int64)), (True, torch.zeros(6, dtype=torch.int64))]
    + [(1, d) for d in (torch.zeros(6), torch.zeros(5, dtype=torch.int64), None)],
)
def test_a_wrong_argument_of_shift_is_refused_with_its_line(k: Any, document: Any) -> None:
    with pytest.raises(ConfigError, match=r"test_attention_arguments.py:\d+"):
        sc.shift(torch.ones(6, 2), k, document)


def test_a_wrong_window_is_refused_while_a_draft_is_lowered() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        q = h[:, None]
        return sc.branch_attention(
            q, q, q, q_limit=i.index, q_document=i.document, k_document=i.document, window=-1
        )

    with pytest.raises(ConfigError, match=r"test_attention_arguments.py:\d+ in body(.|\n)*window"):
        lower_expression(body)


def test_documents_made_from_activations_are_refused_also_when_shared_with_queries() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        q, made = h[:, None], (h[:, 0] > 0).long()
        return sc.branch_attention(q, q, q, q_limit=i.index, q_document=made, k_document=made)

    with pytest.raises(PlanError, match=r"test_attention_arguments.py:\d+ in body"):
        lower_expression(body)


def test_groups_of_floats_are_exact() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        q, exact, coarse = h[:, None], i.index.double(), i.index + 2.0**60
        kept: dict[str, Any] = {
            "q_limit": i.index,
            "q_document": i.document,
            "k_document": i.document,
        }
        a = sc.branch_attention(q, q, q, [(q * 2, q, exact, exact)], **kept)
        b = sc.branch_attention(q, q, q, [(q * 2, q, coarse, coarse)], **kept)  # all rows are equal
        return torch.cat([a, b], -1)

    assert worst_difference(body, cp=2) < 1e-9

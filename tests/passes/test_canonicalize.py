"""What changes nothing leaves the graph, and what only looks so stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from spec_compile.passes.canonicalize import Canonicalize

aten = torch.ops.aten
FLOATS, INTS = torch.empty(3, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")


def changes(target: Any, number: Any, value: torch.Tensor, result: torch.Tensor) -> int:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    y = graph.call_function(target, (x, number))
    y.meta["val"] = result
    graph.output((y,))
    return Canonicalize()(GraphModule(torch.nn.Module(), graph)).changes


@pytest.mark.parametrize(
    ("target", "number", "value"),
    [
        (aten.mul.Tensor, 1.0, FLOATS),
        (aten.mul.Tensor, 1, INTS),
        (aten.div.Tensor, 1, FLOATS),
        (aten.add.Tensor, 0, INTS),
        (aten.sub.Tensor, 0, INTS),
    ],
)
def test_a_neutral_number_leaves_the_graph(target: Any, number: Any, value: torch.Tensor) -> None:
    assert changes(target, number, value, value) == 1


@pytest.mark.parametrize(
    ("target", "number", "value", "result"),
    [
        (aten.mul.Tensor, 0.5, FLOATS, FLOATS),
        (aten.add.Tensor, 0, FLOATS, FLOATS),  # -0.0 + 0 is 0.0
        (aten.mul.Tensor, 1.0, INTS, FLOATS),
        (aten.div.Tensor, 1, INTS, FLOATS),
        (aten.add.Tensor, False, INTS, INTS),
    ],
)
def test_what_changes_sign_value_or_type_stays(
    target: Any, number: Any, value: torch.Tensor, result: torch.Tensor
) -> None:
    assert changes(target, number, value, result) == 0

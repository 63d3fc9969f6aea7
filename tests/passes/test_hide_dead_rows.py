"""Where the graph keeps dead rows out: sums, numbers, and row indices; sizes are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

import spec_compile as sc
from spec_compile import Plan, lower
from tests.analysis.row_bodies import TARGET, draft_of

aten = torch.ops.aten


def body(m: Any, inputs: sc.DraftInputs, h: torch.Tensor) -> sc.DraftOutput:
    total = h.shape[0]
    zeros = torch.zeros(total, 2, dtype=h.dtype)
    loss = (torch.cat([h, zeros], -1).sum(-1) / (total - inputs.index)).sum()
    return sc.DraftOutput(loss * total, inputs.loss_mask.sum())


@pytest.fixture(scope="module", params=[1, 2])
def graph(request: pytest.FixtureRequest) -> Graph:
    plan = Plan(cp=request.param, verify=False)
    return lower(TARGET, draft_of(body), plan).graphs["stage0"].graph


def found(graph: Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.target in targets]


def placeholder(graph: Graph, name: str) -> Node:
    node: Node
    (node,) = (n for n in graph.nodes if n.op == "placeholder" and n.target == name)
    return node


def test_every_sum_over_rows_reads_live_rows_alone(graph: Graph) -> None:
    sums = found(graph, aten.sum.default)
    kept = [node.args[0].target for node in sums]  # type: ignore[union-attr]
    assert sorted(map(str, kept)) == ["aten.logical_and.default", "aten.where.ScalarOther"]


def test_a_sum_over_features_is_left_alone(graph: Graph) -> None:
    (node,) = (n for n in found(graph, aten.sum.dim_IntList) if n.args[1] == [-1])
    assert node.args[0].target == aten.cat.default  # type: ignore[union-attr]


def test_the_number_of_rows_is_the_live_one_but_sizes_are_not(graph: Graph) -> None:
    live = placeholder(graph, "live_rows")
    (left,) = found(graph, aten.rsub.Scalar)
    assert left.args[1] is live
    (zeros,) = found(graph, aten.zeros.default)
    assert live not in zeros.all_input_nodes
    assert any(node.target == aten.mul.Tensor for node in live.users)


def test_nobody_reads_the_index_of_dead_rows(graph: Graph) -> None:
    index = placeholder(graph, "index")
    readers = {node.target for node in index.users}
    assert readers <= {
        aten.lt.Scalar,
        aten.where.ScalarOther,
        torch.ops.spec_compile.shard_rows.default,
    }
    (replaced,) = (node for node in index.users if node.target == aten.where.ScalarOther)
    assert replaced.args[2] == 0

"""Embeddings of shifted ids are rows of one another: fewer taps, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from spec_compile import Plan, lower
from spec_compile.drafts import Eagle3
from spec_compile.ir.facts import KEY, GraphFacts
from spec_compile.ir.meta import KEY as NODE_KEY
from spec_compile.ir.meta import NodeInfo
from spec_compile.passes.share_embeddings import ShareEmbeddings
from spec_compile.runtime import rows  # noqa: F401  registers the op
from tests.step_cases import models

aten = torch.ops.aten
LENGTHS = (3, 1, 5, 0, 2)
DEAD = 2
"""Rows past the last."""


def graph_of(shifts: tuple[int, ...], *, role: str = "draft", cp: int = 1) -> GraphModule:
    """``embedding(table, shift(tokens, k))`` for each k, in the order given."""
    graph = Graph()
    names = ("table", "tokens", "document", "index", "live_rows")
    table, tokens, document, _, live = (graph.placeholder(name) for name in names)
    embedded = []
    for k in shifts:
        ids = graph.call_function(
            torch.ops.spec_compile.shift_whole.default, (tokens, k, document, live)
        )
        embedded.append(graph.call_function(aten.embedding.default, (table, ids)))
    graph.output(tuple(embedded))
    for node in graph.nodes:
        node.meta[NODE_KEY] = NodeInfo(role)
        node.meta["val"] = torch.empty(1, device="meta")
    gm = GraphModule(torch.nn.Module(), graph)
    gm.meta[KEY] = GraphFacts(num_layers=2, cp=cp)
    return gm


def run(gm: GraphModule) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    live = sum(LENGTHS)
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    document = torch.cat((document, torch.full((DEAD,), len(LENGTHS))))
    tokens = torch.randint(1, 7, (live + DEAD,), generator=generator)
    table = torch.randn(7, 4, generator=generator)
    found: tuple[torch.Tensor, ...] = gm(table, tokens, document, torch.arange(live + DEAD), live)
    return found


def lookups(gm: GraphModule) -> int:
    return sum(node.target is aten.embedding.default for node in gm.graph.nodes)


@pytest.mark.parametrize("shifts", [(1, 2, 3, 4), (2, 3), (1, 4), (1, 2, 5)])
def test_longer_shifts_are_rows_of_the_first_one_with_the_same_bits(
    shifts: tuple[int, ...],
) -> None:
    gm = graph_of(shifts)
    before = run(gm)
    assert ShareEmbeddings(2)(gm).changes == len(shifts) - 1
    gm.graph.lint()
    gm.recompile()
    assert lookups(gm) == 1
    for found, expected in zip(run(gm), before, strict=True):
        assert torch.equal(found, expected)


def test_ids_that_are_not_shifted_stay_on_their_own() -> None:
    """Their last row of a document embeds a token of it, not what lies behind its end."""
    gm = graph_of((-1, 0, 1, 2))
    before = run(gm)
    assert ShareEmbeddings(2)(gm).changes == 1
    gm.recompile()
    assert lookups(gm) == 3
    for found, expected in zip(run(gm), before, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("gm", "pp"),
    [
        (graph_of((1, 2)), 1),
        (graph_of((1, 2), cp=2), 2),
        (graph_of((1, 2), role="target"), 2),
        (graph_of((2, 1)), 2),
        (graph_of((1,)), 2),
    ],
    ids=["one stage", "sharded rows", "the target's", "longer first", "one"],
)
def test_other_embeddings_are_left_alone(gm: GraphModule, pp: int) -> None:
    assert ShareEmbeddings(pp)(gm).changes == 0


def test_eagle3_sends_one_embedding_whatever_its_steps() -> None:
    target = models("qwen3", "none")[0]
    lowered = lower(target, Eagle3.from_target(target, 3, taps=(1,)), Plan(pp=2, verify=False))
    assert [tap.what for tap in lowered.facts.tap_values] == ["after 1 layers", "embedding"]
    width = target.config.hidden_size
    assert f"{2 * width} x float64, {16 * width} bytes a token" in lowered.explain()

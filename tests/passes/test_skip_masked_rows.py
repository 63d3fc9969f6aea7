"""Rows that a mask takes out of a loss's sum are handed to the loss; anything else stays as it is."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import spec_compile as sc
from spec_compile.passes.skip_masked_rows import SkipMaskedRows
from spec_compile.runtime import vocabulary  # noqa: F401  registers the op
from tests.models import tiny_llama

aten = torch.ops.aten
LOSS = torch.ops.spec_compile.chunked_soft_cross_entropy.default
ROWS = 6


def graph_of(*, masks: int = 1, sides: tuple[int, ...] = (1, 1), bare: bool = False) -> GraphModule:
    """``loss, overlap`` of one op, each under a where; the masks are computed after it."""
    graph = Graph()
    names = ["h", "w", "z", "hz"]
    loss = graph.call_function(LOSS, tuple(graph.placeholder(name) for name in names))
    pieces = [graph.call_function(operator.getitem, (loss, i)) for i in range(2)]
    first = graph.placeholder("ids")
    found = [graph.call_function(aten.gt.Scalar, (first, i)) for i in range(masks)]
    results: list[Node] = []
    for i, (piece, side) in enumerate(zip(pieces, sides, strict=True)):
        mask = found[i % masks]
        order = (piece, 0.0) if side == 1 else (0.0, piece)
        target = aten.where.ScalarOther if side == 1 else aten.where.ScalarSelf
        results.append(graph.call_function(target, (mask, *order)))
    if bare:
        results.append(graph.call_function(aten.neg.default, (pieces[0],)))
    graph.output(tuple(results))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(ROWS, device="meta")
    return GraphModule(torch.nn.Module(), graph)


def loss_of(gm: GraphModule) -> Node:
    node: Node
    (node,) = (n for n in gm.graph.nodes if n.target is LOSS)
    return node


def test_mask_is_handed_to_the_loss_and_the_graph_still_runs() -> None:
    gm = graph_of()
    torch.manual_seed(0)
    hidden, weight, teacher, head = (torch.randn(n, 4) for n in (ROWS, 9, ROWS, 9))
    ids = torch.tensor([0, 3, 0, 0, 2, 1])
    before = gm(hidden, weight, teacher, head, ids)
    assert SkipMaskedRows()(gm).changes == 1
    gm.graph.lint()
    gm.recompile()
    (mask,) = (n for n in gm.graph.nodes if n.target is aten.gt.Scalar)
    assert loss_of(gm).args[4] is mask
    torch.testing.assert_close(gm(hidden, weight, teacher, head, ids), before)


@pytest.mark.parametrize(
    ("masks", "sides", "bare"),
    [(2, (1, 1), False), (1, (1, 0), False), (1, (1, 1), True)],
    ids=["two masks", "the other side of where", "a reader without mask"],
)
def test_rows_that_are_read_elsewhere_are_kept(
    masks: int, sides: tuple[int, ...], bare: bool
) -> None:
    gm = graph_of(masks=masks, sides=sides, bare=bare)
    assert SkipMaskedRows()(gm).changes == 0
    assert len(loss_of(gm).args) == 4


def draft_program(cp: int) -> Graph:
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2)
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=2)
    lowered = sc.lower(target, draft, sc.Plan(cp=cp, verify=False))
    assert lowered.programs.draft is not None
    return lowered.programs.draft.graph


@pytest.mark.parametrize("cp", [1, 2])
def test_masks_that_the_loss_knows_leave_the_graph(cp: int) -> None:
    graph = draft_program(cp)
    losses = [n for n in graph.nodes if n.target is LOSS]
    assert len(losses) == 2
    assert all(len(loss.args) == 5 for loss in losses)
    read = {user.target for loss in losses for item in loss.users for user in item.users}
    assert read == {aten.sum.default}


def test_own_rows_of_angles_are_made_of_own_positions() -> None:
    graph = draft_program(2)
    cut = [n.args[0] for n in graph.nodes if n.target is torch.ops.spec_compile.shard_rows.default]
    assert "positions" in [node.target for node in cut]
    assert all(node.meta["val"].ndim == 1 for node in cut)

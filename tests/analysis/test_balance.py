"""Layers are split over stages so that the dearest stage is as cheap as it can be."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from spec_compile import Plan, lower
from spec_compile.analysis import balance
from spec_compile.analysis.balance import LayerCosts, layer_costs, loss_weights, split_layers
from spec_compile.drafts import DFlash, DSpark, Eagle3
from spec_compile.errors import PlanError
from spec_compile.ir.facts import KEY, PLANNED_TOKENS, GraphFacts, PlannedRow
from spec_compile.ir.meta import update
from spec_compile.ir.operator import BODIES
from spec_compile.passes import assign_stages
from tests.step_cases import models


def test_equal_layers_are_split_evenly_with_larger_stages_first() -> None:
    costs = LayerCosts((10.0,) * 7, embedding=0.0, head=1.0, draft=0.0)
    assert split_layers(costs, 3) == ((0, 3), (3, 5), (5, 7))


def test_a_dear_draft_leaves_its_stage_fewer_layers() -> None:
    costs = LayerCosts((10.0,) * 8, embedding=0.0, head=5.0, draft=25.0)
    assert split_layers(costs, 2) == ((0, 5), (5, 8))
    assert split_layers(costs, 2, 2) == ((0, 3), (3, 5), (5, 7), (7, 8))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 40),
    st.integers(1, 4),
)
def test_no_split_has_a_cheaper_dearest_stage(layers: list[int], draft: int, stages: int) -> None:
    costs = LayerCosts(tuple(map(float, layers)), 1.0, 2.0, float(draft))
    if stages > len(layers):
        with pytest.raises(PlanError, match="need as many decoder layers"):
            split_layers(costs, stages)
        return
    split = split_layers(costs, stages)
    assert [first for first, _ in split] == [0, *(past for _, past in split[:-1])]
    assert split[-1][1] == len(layers)
    cuts = itertools.combinations(range(1, len(layers)), stages - 1)
    best = min(
        max(costs.stage(a, b) for a, b in itertools.pairwise((0, *cut, len(layers))))
        for cut in cuts
    )
    assert max(costs.stage(a, b) for a, b in split) == best


def test_costs_of_a_model_are_counted_from_its_weights() -> None:
    target, draft = models("llama", "none")
    lowered = lower(target, draft, Plan(pp=3, verify=False))
    layer = sum(p.numel() for p in target.model.layers[0].parameters() if p.ndim > 1)
    head = target.lm_head.weight.numel() * 4 / 3
    width = target.config.hidden_size
    assert lowered.facts.stage_costs == pytest.approx((layer + width, layer, layer + head))
    share = (layer + head) / (3 * layer + width + head)
    assert f"{share:.0%} of the products with weights" in lowered.explain()


class Rows(torch.nn.Module):
    """Products over tokens, over blocks at anchors, over two depths, and over the experts of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(7, 4))
        self.each = torch.nn.Parameter(torch.zeros(4, 11))
        self.block = torch.nn.Parameter(torch.zeros(5, 4))
        self.experts = torch.nn.Parameter(torch.zeros(8, 3, 4))

    def forward(self, tokens: torch.Tensor, anchors: torch.Tensor) -> list[torch.Tensor]:
        x = F.embedding(tokens, self.table)
        slots = x[anchors][:, None].expand(-1, 6, -1)
        chosen = torch.stack([tokens % 8, tokens % 3], 1)
        pairs = x[:, None].expand(-1, 2, -1).contiguous()
        ops = torch.ops.spec_compile
        taught = ops.chunked_soft_cross_entropy(x, self.block, torch.cat([x, x])[1:], self.table)
        return [
            torch.cat([x, x]) @ self.each,
            F.linear(slots, self.block),
            ops.expert_linear(pairs, self.experts, None, chosen, False),
            taught[0],
        ]


def test_products_are_counted_for_the_rows_that_are_multiplied() -> None:
    given = torch.zeros(20, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    gm = make_fx(Rows(), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
    row = PlannedRow.of(anchors_per_document=25, max_tokens=100)
    gm.meta[KEY] = GraphFacts(num_layers=0, planned_row=row)
    _, anchors = (node for node in gm.graph.nodes if node.op == "placeholder")
    anchors.target = "anchors"
    for node in gm.graph.nodes:
        update(node, role="draft")
    blocks = 25 / 100 * 6
    losses = 4 / 3 * 5 * 4 + 2 / 3 * 7 * 4 * (2 * 100 - 1) / 100
    wanted = 4 + 2 * 4 * 11 + blocks * 5 * 4 + 2 * 3 * 4 + losses
    assert layer_costs(gm).draft == pytest.approx(wanted)


def test_a_planned_document_has_no_more_anchors_than_tokens() -> None:
    assert PlannedRow.of(512, None) == PlannedRow(PLANNED_TOKENS, 512)
    assert PlannedRow.of(512, 100) == PlannedRow(100, 100)


def test_every_operator_that_reads_logits_is_counted() -> None:
    found = {name for name, body in BODIES.items() if _makes_logits(body)}
    assert len(found) >= 4
    for name in found:
        overload = getattr(torch.ops.spec_compile, name.split("::")[1]).default
        assert loss_weights(overload), name


def _makes_logits(body: Any) -> bool:
    """Tell whether a function calls ``logits_of``, perhaps by others of this package."""
    todo, seen = [(body.__code__, body.__globals__)], set[Any]()
    while todo:
        code, known = todo.pop()
        seen.add(code)
        if "logits_of" in code.co_names:
            return True
        inner = [(c, known) for c in code.co_consts if inspect.iscode(c)]  # comprehensions
        called = [f for name in code.co_names if inspect.isfunction(f := known.get(name))]
        inner += [
            (f.__code__, f.__globals__) for f in called if f.__module__.startswith("spec_compile.")
        ]
        todo += [pair for pair in inner if pair[0] not in seen]
    return False


SLOW = pytest.mark.slow
LOSSES: list[Any] = [
    pytest.param(functools.partial(Eagle3.from_target, ttt_length=3, loss="kl"), 3, id="law"),
    pytest.param(functools.partial(Eagle3.from_target, ttt_length=3), 3, id="soft", marks=SLOW),
    pytest.param(functools.partial(DFlash.from_target, block_size=3), 1, id="label", marks=SLOW),
    pytest.param(functools.partial(DSpark.from_target, block_size=3), 1, id="more", marks=SLOW),
]


@pytest.mark.parametrize(("make", "calls"), LOSSES)
def test_a_draft_is_charged_for_the_products_of_its_losses(
    make: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = models("llama", "none")
    draft = make(target, num_hidden_layers=1)
    found: list[LayerCosts] = []

    def spied(gm: GraphModule) -> LayerCosts:
        with monkeypatch.context() as without_losses:
            without_losses.setattr(balance, "loss_weights", lambda target: [])
            found.append(layer_costs(gm))
        found.append(layer_costs(gm))
        return found[-1]

    monkeypatch.setattr(assign_stages, "layer_costs", spied)
    tokens = 1024
    lowered = lower(target, draft, Plan(pp=3, max_tokens_per_micro_batch=tokens, verify=False))
    head = target.lm_head.weight.numel()
    # forward, again in the backward, and two products of gradients; a teacher's has the first two
    products = calls * (4 + 2) * head
    if isinstance(draft, DSpark):
        products += 4 * draft.markov_head.markov_w2.weight.numel()
    if isinstance(draft, DFlash):
        products *= draft.num_draft_tokens * draft.anchors_per_document / tokens
        row = f"for one document of {tokens} tokens with {draft.anchors_per_document} anchors"
        assert f"products are counted {row}" in lowered.explain()
    without, whole = found
    assert whole.draft - without.draft == pytest.approx(products / 3)
    assert whole.head - without.head == pytest.approx(head * 4 / 3)

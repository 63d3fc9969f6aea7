"""Layers are split over stages so that the dearest stage is as cheap as it can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_compile import Plan, lower
from spec_compile.analysis.balance import LayerCosts, split_layers
from spec_compile.errors import PlanError
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

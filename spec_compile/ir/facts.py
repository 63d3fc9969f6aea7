"""Facts about a whole graph: ``gm.meta["facts"]`` holds one frozen `GraphFacts`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

KEY = "facts"


PLANNED_TOKENS = 32768
"""Length of the one document that costs are predicted for, where micro-batches may be of any size."""


@dataclass(frozen=True)
class PlannedRow:
    """The packed row that costs are predicted for: one document, with as many anchors as the draft asks for."""

    tokens: int
    anchors: int

    @classmethod
    def of(cls, anchors_per_document: int, max_tokens: int | None) -> PlannedRow:
        """The longest document that a micro-batch can hold, or one of `PLANNED_TOKENS`."""
        tokens = max_tokens or PLANNED_TOKENS
        return cls(tokens, min(anchors_per_document, tokens))


@dataclass(frozen=True)
class StrategyFact:
    """What one attention is predicted to cost a rank under one strategy, forward and backward."""

    name: str
    sent_bytes: int
    flops: int
    compute_ms: float
    exchange_ms: float
    total_ms: float
    """Less than the sum of both where tiles hide the exchange."""
    planned: bool
    """Whether the predicted row would go this way."""


@dataclass(frozen=True)
class AttentionFact:
    """How one attention of the graph runs."""

    name: str
    owner: str
    """ "target layer 3" or "draft step 2"."""
    heads: tuple[int, int]
    """Query heads, key/value heads."""
    head_dim: int
    branches: tuple[str, ...]
    """One a branch: "diagonal", "block" (an anchor's own slots), "slots" (any anchors') or "general"."""
    window: int | None
    strategy: str
    reason: str
    costs: tuple[StrategyFact, ...] = ()
    """Of every strategy; none with one context-parallel rank."""
    slots: int = 0
    """Query rows an anchor; 0: one a packed row."""
    branch_keys: int = 0
    """Branch keys that a query row sees of its own row or anchor; shared ones are not counted."""
    value_dim: int = 0
    """Head dim of the values; 0: as that of the queries."""


@dataclass(frozen=True)
class TapFact:
    """One value that crosses pipeline stages outside the schedule."""

    source: int
    width: int
    dtype: str
    what: str


@dataclass(frozen=True)
class GraphFacts:
    """What the passes know about the graph as a whole."""

    num_layers: int
    taps: tuple[int, ...] = ()
    has_draft: bool = False
    stat_names: tuple[str, ...] = ()
    embedding_name: str = ""
    head_name: str = ""
    cp: int = 1
    stage_layers: tuple[tuple[int, int], ...] = ()
    """First and past-the-last layer of each stage."""
    stage_costs: tuple[float, ...] = ()
    """Multiply-adds a token of ``planned_row`` with each stage's weights."""
    attentions: tuple[AttentionFact, ...] = ()
    tap_values: tuple[TapFact, ...] = ()
    planned_row: PlannedRow = PlannedRow(PLANNED_TOKENS, 0)
    """What ``AttentionFact.costs`` and ``stage_costs`` are predicted for."""
    general_branches: int = 0
    anchors_per_document: int = 0
    """Anchors that the library draws; 0: the draft reads none."""
    prove_by_execution: bool = False
    """Whether the draft lets a softmax written by hand be recognised, and proved by execution."""
    notes: tuple[str, ...] = ()


def add_note(gm: GraphModule, note: str) -> None:
    """Have a line of what to know in the report."""
    set_facts(gm, notes=(*facts(gm).notes, note))


def facts(gm: GraphModule) -> GraphFacts:
    """Facts of a graph."""
    value = gm.meta[KEY]
    assert isinstance(value, GraphFacts)
    return value


def set_facts(gm: GraphModule, **changes: Any) -> None:
    """Change some facts of a graph."""
    gm.meta[KEY] = dataclasses.replace(facts(gm), **changes)

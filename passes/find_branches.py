"""Find every attention, refuse undeclared ones, and classify the branches of the declared ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.sizes import Rows
from spec_compile.errors import PlanError
from spec_compile.ir.facts import AttentionFact, set_facts
from spec_compile.ir.meta import at_node, info

from .base import Cap, PassResult

ATTENTION = torch.ops.spec_compile.branch_attention.default
aten = torch.ops.aten
ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
REPEATED = (
    aten.repeat_interleave.self_int, aten.expand.default, aten.unsqueeze.default, aten.view.default,
    aten.reshape.default, aten.flatten.using_ints, aten.clone.default, aten.contiguous.default,
)  # fmt: skip
"""These make [A * B] of [A]; as anchors come first, each number stays on its own anchor's slots."""
OWN = ("diagonal", "block")
"""Kinds of branches whose keys are of the query's own row or anchor."""
UNDECLARED = ("scaled_dot_product_attention", "flex_attention")


@dataclass(frozen=True, slots=True)
class FindBranches:
    """A branch grouped by the row index is diagonal: one key, of the row's own; one by anchor is a block."""

    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.ROLES})
    provides: ClassVar[frozenset[Cap]] = frozenset({Cap.ATTENTION_DECLARED, Cap.BRANCHES})

    def __call__(self, gm: GraphModule) -> PassResult:
        found: list[AttentionFact] = []
        sizes = Rows(gm.graph)
        steps = 0
        for node in gm.graph.nodes:
            if any(name in str(node.target) for name in UNDECLARED):
                raise PlanError(
                    at_node(node, "is attention in a spelling that is not recognised yet; ")
                    + "write sc.branch_attention(q, k, v, branches, q_limit=..., q_document=..., k_document=...)"
                )
            if node.target == ATTENTION:
                facts = info(node)
                owner = (
                    f"target layer {facts.layer}"
                    if facts.role == "target"
                    else f"draft attention {steps}"
                )
                steps += facts.role != "target"
                found.append(_describe(node, owner, sizes))
        set_facts(gm, attentions=tuple(found))
        return PassResult(gm, len(found))


def _describe(node: Node, owner: str, sizes: Rows) -> AttentionFact:
    q, k, v = node.args[:3]
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    assert isinstance(v, Node)
    shape: Any = q.meta["val"].shape
    window, kinds = node.args[12], branch_kinds(node, sizes)
    groups: Any = node.args[5]
    return AttentionFact(
        name=node.name,
        owner=owner,
        heads=(int(shape[1]), int(k.meta["val"].shape[1])),
        head_dim=int(shape[2]),
        branches=kinds,
        window=None if window == -1 else int(window),  # type: ignore[arg-type]
        strategy="",
        reason="",
        slots=sizes.multiple(shape[0]) if sizes.anchored(shape[0]) else 0,
        branch_keys=sum(
            sizes.multiple(group.meta["val"].shape[0])
            for group, kind in zip(groups, kinds, strict=True)
            if kind in OWN
        ),
        value_dim=int(v.meta["val"].shape[2]),
    )


def branch_kinds(node: Node, sizes: Rows) -> tuple[str, ...]:
    """Kind of each branch of a declared attention: "diagonal", "block", "slots" or "general"."""
    groups: Any = zip(node.args[5], node.args[6], strict=True)  # type: ignore[arg-type]
    return tuple(_kind(k, q, sizes) for k, q in groups)


def _kind(k_group: Node, q_group: Node, sizes: Rows) -> str:
    if k_group is q_group and _is_row_index(k_group):
        return "diagonal"
    if not sizes.anchored(k_group.meta["val"].shape[0]):
        return "general"
    own = k_group is q_group or _hides_some(q_group, k_group)
    return "block" if own and _is_anchor_number(k_group, sizes) else "slots"


def _hides_some(q_group: Node, k_group: Node) -> bool:
    """Whether queries have their own anchor's number, as its keys do, or a negative one, which no anchor has."""
    while k_group.target in REPEATED:
        k_group = k_group.args[0]  # type: ignore[assignment]
    while q_group is not k_group:
        other = q_group.args[2] if q_group.target == aten.where.ScalarOther else 0
        if q_group.target in REPEATED:
            q_group = q_group.args[0]  # type: ignore[assignment]
        elif isinstance(other, int) and other < 0:
            q_group = q_group.args[1]  # type: ignore[assignment]
        else:
            return False
    return True


def _is_anchor_number(node: Node, sizes: Rows) -> bool:
    """One number an anchor, repeated over its slots, that no other used anchor has."""
    while node.target in REPEATED:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    if node.op == "placeholder":
        return node.target == "anchors"
    return node.target in ARANGES and sizes.multiple(node.meta["val"].shape[0]) == 1


def _is_row_index(node: Node) -> bool:
    """The placeholder ``index``, or ``index`` plus or minus a constant: a different value in every row."""
    if node.op == "placeholder":
        return node.target == "index"
    if node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor):
        source, constant = node.args[:2]
        exact = isinstance(constant, int)  # adding a large float would make rows equal
        return isinstance(source, Node) and exact and not node.kwargs and _is_row_index(source)
    return False

"""A lowered step in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from spec_compile.ir.facts import AttentionFact, GraphFacts, PlannedRow, StrategyFact
from spec_compile.plan import Plan


def explain(
    *,
    plan: Plan,
    facts: GraphFacts,
    names: tuple[str, str],
    parameters: tuple[int, int],
    nodes: dict[str, int],
    merges: str,
    losses: str,
    attention: str,
    hardware: str,
    tap_slots: Mapping[int, int],
    tap_channels: Mapping[str, str],
    verified: str,
    seconds: float,
) -> str:
    """Describe stages, attention, branches, taps and checks, a few lines each."""
    target, draft = names
    lines = [
        f"{target} ({parameters[0]:,} parameters, {facts.num_layers} layers)"
        + (
            f" with draft {draft} ({parameters[1]:,} parameters, taps {facts.taps})"
            if draft
            else ", no draft"
        ),
        f"plan: dp={plan.dp} cp={plan.cp} pp={plan.pp}, {plan.micro_batches} micro-batches, schedule {plan.schedule}, "
        f"{plan.world_size} ranks; lowered in {seconds:.1f} s",
        "",
        "stages:",
    ]
    several = len(facts.stage_layers) > plan.pp
    for stage, (first, past) in enumerate(facts.stage_layers):
        place = f" on pipeline rank {stage % plan.pp}" if several else ""
        extra = " + embedding" if stage == 0 else ""
        if stage == len(facts.stage_layers) - 1:
            extra += " + norm, head, policy loss" + (", draft" if draft else "")
        work = facts.stage_costs[stage] / max(1.0, sum(facts.stage_costs))
        lines.append(
            f"  stage {stage}{place}: layers {first}..{past - 1}{extra} ({nodes[f'stage{stage}']} nodes, "
            f"{work:.0%} of the products with weights)"
        )
    row = facts.planned_row
    if row.anchors:
        lines.append(f"  products are counted {_row(row)}")
    if plan.schedule == "zero_bubble":
        lines.append(
            "  weights of linear layers: their gradients are computed apart, where a rank would wait"
        )
    if plan.recompute == "layers":
        lines.append(
            "  recompute: the backward runs each decoder layer again, from its inputs and attention outputs; nothing "
            "is sent twice"
        )
    lines += ["", "attention:", *_attention_lines(facts.attentions)]
    if any(item.costs for item in facts.attentions):
        lines += [
            f"  costs: of one rank, forward and backward, predicted {_row(facts.planned_row)} "
            f"on {hardware}"
        ]
    lines += [f"  kernel: {attention}; merges of partials: {merges}"]
    if facts.general_branches:
        lines.append(
            f"  {facts.general_branches} branches share keys between rows and are gathered over cp: right, not fast"
        )
    lines += ["", "taps:", *_tap_lines(facts, tap_slots)]
    if facts.tap_values:
        lines += _channel_lines(plan, tap_channels)
    lines += ["", f"losses over the vocabulary, in chunks of tokens x words: {losses}"]
    lines += ["", f"checks: {verified}"]
    lines += [f"note: {note}" for note in facts.notes]
    return "\n".join(lines)


def _row(row: PlannedRow) -> str:
    anchors = f" with {row.anchors} anchors" if row.anchors else ""
    return f"for one document of {row.tokens} tokens{anchors}"


def _attention_lines(attentions: Sequence[AttentionFact]) -> list[str]:
    groups: dict[tuple[object, ...], list[AttentionFact]] = {}
    for item in attentions:
        key = (
            item.owner.split(" ")[0],
            item.heads,
            item.head_dim,
            item.branches,
            item.window,
            item.strategy,
            item.reason,
            item.costs,
        )
        groups.setdefault(key, []).append(item)
    lines = []
    for group in groups.values():
        first = group[0]
        who = (
            first.owner
            if len(group) == 1
            else f"{first.owner} .. {group[-1].owner.split(' ', 1)[1]} ({len(group)})"
        )
        kinds = Counter(first.branches)
        branches = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "no"
        window = f", window {first.window}" if first.window else ""
        lines.append(
            f"  {who}: {first.heads[0]}/{first.heads[1]} heads of {first.head_dim}{window}, {branches} branches; "
            f"{first.strategy}: {first.reason}"
        )
        lines += [_cost_line(cost) for cost in first.costs]
    return lines


def _cost_line(cost: StrategyFact) -> str:
    return (
        f"    {'*' if cost.planned else ' '} {cost.name:10} {cost.total_ms:8.2f} ms: {cost.compute_ms:.2f} of tiles "
        f"({cost.flops / 1e9:.4g} GFLOP), {cost.exchange_ms:.2f} of exchange ({cost.sent_bytes / 2**20:.4g} MiB sent)"
    )


def _channel_lines(plan: Plan, channels: Mapping[str, str]) -> list[str]:
    held = "  a slot is read in place and held until the draft's backward of its micro-batch is through"
    if not channels:
        return [held, f"  transport: {plan.tap_transport}; the ranks choose one for every channel"]
    return [held, *(f"  channel {name}: {how}" for name, how in sorted(channels.items()))]


def _tap_lines(facts: GraphFacts, slots: Mapping[int, int]) -> list[str]:
    if not facts.has_draft:
        return ["  none: no draft"]
    if not facts.tap_values:
        return ["  none cross a stage"]
    last = len(facts.stage_layers) - 1
    lines = []
    for source in sorted({t.source for t in facts.tap_values}):
        values = [t for t in facts.tap_values if t.source == source]
        width = sum(t.width for t in values)
        size = sum(t.width * getattr(torch, t.dtype).itemsize for t in values)
        what = ", ".join(
            f"{n} x {w}" if n > 1 else w for w, n in Counter(t.what for t in values).items()
        )
        lines.append(
            f"  stage {source} -> stage {last}: {what} ({width} x {values[0].dtype}, {size} bytes a token), "
            f"one write a micro-batch into {slots[source]} slots"
        )
    return lines

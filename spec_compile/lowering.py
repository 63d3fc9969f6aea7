"""Lower a target and a draft for a plan: capture, passes, stages. Needs no process group and no weights."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from spec_compile.analysis.hardware import hardware_for
from spec_compile.capture.trace import Captured, capture
from spec_compile.errors import ConfigError, SpecCompileError
from spec_compile.ir.facts import KEY as FACTS
from spec_compile.ir.facts import GraphFacts, PlannedRow, facts
from spec_compile.ir.printer import format_graph
from spec_compile.observe.explain import explain
from spec_compile.observe.html import page
from spec_compile.observe.trace import emit
from spec_compile.pairing import check_apart, check_pair, kind_of
from spec_compile.passes.pipeline import PassRecord, default_passes, run
from spec_compile.passes.split_programs import Programs, split_programs
from spec_compile.passes.split_stages import split_stages
from spec_compile.plan import Plan
from spec_compile.runtime.kernels import attention_kernel, loss_kernel, merge_kernel
from spec_compile.runtime.schedule import build_schedule, padded_micro_batches, tap_depths

from .verification import check_numbers


@dataclass
class Lowered:
    """A lowered step: what every rank will run, readable on a laptop."""

    plan: Plan
    graphs: dict[str, GraphModule]
    """One graph a stage: "stage0", ...; the draft and the losses are in the last."""
    history: list[PassRecord]
    """One record a pass: name, seconds, changes, text before and after."""
    facts: GraphFacts
    programs: Programs
    """The last stage's policy and draft parts."""
    plan_hash: str
    """The same on two ranks exactly when they run the same graphs under the same plan."""
    verified: str
    seconds: float
    tap_channels: dict[str, str] = field(default_factory=dict)
    """How the taps of each channel travel, and how fast; known once ranks are bound."""
    _names: tuple[str, str] = field(repr=False, default=("", ""))
    _parameters: tuple[int, int] = field(repr=False, default=(0, 0))

    def explain(self) -> str:
        """The step in words: stages, attention, strategies and their cost, taps, checks."""
        device, dtype = _device_and_dtype(self.graphs["stage0"], self.plan)
        head_dim = self.facts.attentions[0].head_dim if self.facts.attentions else 64
        return explain(
            plan=self.plan,
            facts=self.facts,
            names=self._names,
            parameters=self._parameters,
            nodes={name: len(gm.graph.nodes) for name, gm in self.graphs.items()},
            merges=merge_kernel(device),
            losses=loss_kernel(device),
            attention=attention_kernel(device, dtype, head_dim, head_dim, self.plan.attention),
            hardware=hardware_for(device.type).name,
            tap_slots=tap_slots(self.plan, self.facts),
            tap_channels=self.tap_channels,
            verified=self.verified,
            seconds=self.seconds,
        )

    def text(self) -> str:
        """All stage graphs in the stable text form."""
        return "\n\n".join(f"# {name}\n{format_graph(gm)}" for name, gm in self.graphs.items())

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page with the explanation, the passes and the graphs."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        graphs = {name: format_graph(gm) for name, gm in self.graphs.items()}
        path.write_text(
            page(f"spec_compile {self.plan_hash}", self.explain(), self.history, graphs),
            encoding="utf-8",
        )
        return path


def lower(target: nn.Module, draft: nn.Module | None, plan: Plan) -> Lowered:
    """Lower a plain target and a plain draft for any plan size.

    Args:
        target: transformers causal language model on any device, also meta; left as it was.
        draft: module of the draft contract, or None.
        plan: sizes, schedule and numerics.

    Raises:
        ConfigError: an argument is of a wrong type, the draft has active dropout, or was made for another target.
        CaptureError: the models cannot be traced; names the source line.
        PlanError: models and plan do not fit, for instance a draft that looks across rows.
    """
    check_kinds(target, draft, plan)
    start = time.perf_counter()
    dtype = getattr(torch, plan.param_dtype) if plan.param_dtype else None
    captured = capture(target, draft, dtype=dtype)
    gm = captured.graph_module
    gm.meta[FACTS] = _first_facts(captured, plan)
    # the passes edit the graph in place, and their refusals say more than differing numbers do
    plain = replace(captured, graph_module=_copy(gm))
    try:
        gm, history = run(gm, default_passes(plan))
    except SpecCompileError as error:
        if captured.hint:
            error.add_note(captured.hint)
        raise
    verified = check_numbers(target, draft, plain, plan)
    graphs = split_stages(gm)
    programs = split_programs(graphs[f"stage{plan.num_stages - 1}"])
    text = "\n".join(format_graph(g) for g in graphs.values())
    for i, record in enumerate(history):
        emit(f"{i:02d}_{record.name}", record.after)
    return Lowered(
        plan=plan,
        graphs=graphs,
        history=history,
        facts=facts(gm),
        programs=programs,
        plan_hash=hashlib.blake2b((plan.text() + text).encode(), digest_size=12).hexdigest(),
        verified=verified,
        seconds=time.perf_counter() - start,
        _names=(type(target).__name__, type(draft).__name__ if draft is not None else ""),
        _parameters=(_count(target), _count(draft)),
    )


def check_kinds(target: Any, draft: Any, plan: object) -> None:
    """Refuse arguments that are no models or no plan, and a draft that is not the target's, or shares with it.

    Raises:
        ConfigError: says which one, what it should be, and what it is.
    """
    check_pair(target, draft)
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"plan must be a Plan, found {kind_of(plan)}; Plan() is that of one device"
        )
    check_apart(target, draft)


def tap_slots(plan: Plan, known: GraphFacts) -> dict[int, int]:
    """Slots of each source stage's tap channel when a step has the plan's number of micro-batches."""
    number = padded_micro_batches(plan.schedule, plan.micro_batches, plan.pp)
    orders = build_schedule(plan.schedule, plan.pp, number, plan.num_stages // plan.pp)
    return tap_depths(orders, sorted({tap.source for tap in known.tap_values}))


def _copy(gm: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def _first_facts(captured: Captured, plan: Plan) -> GraphFacts:
    return GraphFacts(
        num_layers=captured.num_layers,
        taps=captured.taps,
        has_draft=captured.has_draft,
        stat_names=captured.stat_names,
        anchors_per_document=captured.anchors_per_document,
        planned_row=PlannedRow.of(captured.anchors_per_document, plan.max_tokens_per_micro_batch),
        embedding_name=captured.embedding_name,
        head_name=captured.head_name,
        prove_by_execution=captured.prove_by_execution,
        notes=captured.notes,
    )


def _count(module: nn.Module | None) -> int:
    return sum(p.numel() for p in module.parameters()) if module is not None else 0


def _device_and_dtype(gm: GraphModule, plan: Plan) -> tuple[torch.device, torch.dtype]:
    parameter = next(gm.parameters())
    return parameter.device, getattr(
        torch, plan.param_dtype
    ) if plan.param_dtype else parameter.dtype

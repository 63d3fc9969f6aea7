"""Give one rank its part of the models: which parameters it owns, and the rest to the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from spec_compile.errors import PlanError
from spec_compile.ir.facts import GraphFacts
from spec_compile.plan import Plan

from .anchors import AnchorRule
from .gradients import OwnedParameters
from .recompute import recompute_layers
from .schedule import rank_of
from .split_backward import split_weights
from .stage_run import StageGraphs


class ProgramParts(Protocol):
    """The last stage, taken apart."""

    @property
    def policy(self) -> GraphModule:
        """Without the draft."""

    @property
    def draft(self) -> GraphModule | None:
        """The draft alone."""

    @property
    def count(self) -> GraphModule | None:
        """The draft's count from ids and masks."""


class LoweredStep(Protocol):
    """What the runtime needs of a lowered step."""

    @property
    def plan(self) -> Plan:
        """The plan it was lowered for."""

    @property
    def graphs(self) -> dict[str, GraphModule]:
        """One graph a stage."""

    @property
    def facts(self) -> GraphFacts:
        """Facts about the joint graph."""

    @property
    def programs(self) -> ProgramParts:
        """Parts of the last stage."""

    @property
    def plan_hash(self) -> str:
        """What ranks compare."""

    @property
    def tap_channels(self) -> dict[str, str]:
        """How taps travel, for `explain`."""

    def explain(self) -> str:
        """The step in words."""

    def text(self) -> str:
        """The stage graphs in the stable text form."""

    def report(self, path: str | Path) -> Path:
        """Write the HTML page."""


def anchor_rule(lowered: LoweredStep) -> AnchorRule | None:
    """How the library draws anchors for a draft that reads them."""
    number = lowered.facts.anchors_per_document
    return AnchorRule(number, lowered.plan.seed) if number else None


@dataclass(frozen=True)
class Ownership:
    """The pp ranks that compute with each parameter, by the parameter's name in its module."""

    policy: dict[str, tuple[int, ...]]
    """Every name of the target, aliases included -> owning ranks, first one first."""
    draft: dict[str, tuple[int, ...]]


def ownership(lowered: LoweredStep, target: nn.Module, draft: nn.Module | None) -> Ownership:
    """Find the owners of all parameters; parameters that no graph reads belong to the first rank.

    Raises:
        PlanError: a parameter is shared by ranks other than the first and the last.
    """
    pp, last = lowered.plan.pp, len(lowered.graphs) - 1
    owners: dict[int, set[int]] = {}
    for stage in range(last + 1):
        gm = lowered.programs.policy if stage == last else lowered.graphs[f"stage{stage}"]
        for parameter in gm.parameters():
            owners.setdefault(id(parameter), set()).add(rank_of(stage, pp))
    policy: dict[str, tuple[int, ...]] = {}
    for name, parameter in target.named_parameters(remove_duplicate=False):
        ranks = owners.get(id(parameter), {0})
        if len(ranks) > 1 and ranks != {0, pp - 1}:
            raise PlanError(
                f"parameter {name} is used by pipeline ranks {sorted(ranks)}; only the first and the last may "
                "share one (tied embeddings). Use a smaller pp"
            )
        policy[name] = tuple(sorted(ranks))
    names = [] if draft is None else [n for n, _ in draft.named_parameters(remove_duplicate=False)]
    return Ownership(policy, {name: (rank_of(last, pp),) for name in names})


def owned_parameters(
    owners: Ownership, target: nn.Module, draft: nn.Module | None, rank: int
) -> OwnedParameters:
    """Collect the trainable parameters of one pp rank; call it before `release_others`."""
    mine = {n: p for n, p in target.named_parameters() if p.requires_grad}
    policy = [p for n, p in mine.items() if rank in owners.policy[n]]
    tied = [p for n, p in mine.items() if rank in owners.policy[n] and len(owners.policy[n]) > 1]
    drafts = [
        p
        for n, p in (draft.named_parameters() if draft is not None else ())
        if rank in owners.draft[n] and p.requires_grad
    ]
    return OwnedParameters(policy, drafts, tied, counts_tied=rank == 0)


def release_others(
    owners: Ownership, target: nn.Module, draft: nn.Module | None, lowered: LoweredStep, rank: int
) -> None:
    """Replace the parameters of other pp ranks by meta ones, in the user's modules and in all graphs.

    What target and draft share stays where either of them is computed.
    """
    swapped: dict[int, nn.Parameter] = {}
    tables = [(m, t) for m, t in ((target, owners.policy), (draft, owners.draft)) if m is not None]
    needed = {id(m.get_parameter(n)) for m, t in tables for n, ranks in t.items() if rank in ranks}
    for module, table in tables:
        _swap(module, {n for n in table if id(module.get_parameter(n)) not in needed}, swapped)
    if not swapped:
        return
    graphs: list[Any] = [*lowered.graphs.values(), lowered.programs.policy, lowered.programs.draft]
    for gm in graphs:
        if gm is not None:
            names = {n for n, p in gm.named_parameters(remove_duplicate=False) if id(p) in swapped}
            _swap(gm, names, swapped)


def _swap(module: nn.Module, names: set[str], swapped: dict[int, nn.Parameter]) -> None:
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        holder = module.get_submodule(path)
        old = holder._parameters[leaf]
        assert old is not None
        if id(old) not in swapped:
            swapped[id(old)] = nn.Parameter(
                torch.empty_like(old, device="meta"), requires_grad=old.requires_grad
            )
        holder._parameters[leaf] = swapped[id(old)]


def rank_graphs(lowered: LoweredStep, rank: int) -> list[StageGraphs]:
    """The graphs of all stages of one pp rank, in order."""
    stages = range(len(lowered.graphs))
    return [stage_graphs(lowered, s) for s in stages if rank_of(s, lowered.plan.pp) == rank]


def stage_graphs(lowered: LoweredStep, stage: int) -> StageGraphs:
    """The graphs that one stage runs, and the activations between stages."""
    last = len(lowered.graphs) - 1
    nodes = [n for gm in lowered.graphs.values() for n in gm.graph.nodes]
    hidden = [n for n in nodes if n.op == "placeholder" and n.target == "hidden"]
    example = hidden[0].meta["val"] if hidden else None
    policy = lowered.programs.policy if stage == last else lowered.graphs[f"stage{stage}"]
    splits = lowered.plan.schedule == "zero_bubble"
    if splits:
        policy = split_weights(policy)
    if lowered.plan.recompute == "layers":
        policy = recompute_layers(policy)
    return StageGraphs(
        stage=stage,
        num_stages=last + 1,
        policy=policy,
        draft=lowered.programs.draft if stage == last else None,
        stat_names=lowered.facts.stat_names,
        hidden_width=int(example.shape[-1]) if example is not None else 0,
        hidden_dtype=example.dtype if example is not None else torch.float32,
        splits_weights=splits,
    )


def draft_steps(lowered: LoweredStep) -> int | None:
    """Length of the draft's vectors of loss sums and counts; None for scalars, or without a draft."""
    if lowered.programs.draft is None:
        return None
    output = next(iter(reversed(lowered.programs.draft.graph.nodes)))
    shape = output.args[0][0].meta["val"].shape
    return int(shape[0]) if shape else None


def vocab_size(target: Any) -> int:
    """Ids that both the input embedding and the head know."""
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    return int(min(embedding.weight.shape[0], head.weight.shape[0]))

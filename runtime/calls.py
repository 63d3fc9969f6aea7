"""One call of a model: micro-batches, schedule, taps, and the stage run that they drive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spec_compile.batch import CheckedBatch, take_documents
from spec_compile.plan import Plan

from .binding import LoweredStep, anchor_rule
from .executor import run_forward, run_schedule
from .micro_batch import MicroBatch, deal, make_micro_batch
from .schedule import Action, build_schedule, padded_micro_batches, tap_depth
from .stage_run import StageGraphs, StageRun, StepOptions
from .tap_ring import TapSpec
from .taps import TapChannels
from .world import World


class Caller:
    """Runs a stage's graphs over the micro-batches of one call after another."""

    def __init__(
        self,
        lowered: LoweredStep,
        world: World,
        graphs: StageGraphs,
        draft_parameters: Sequence[Tensor],
    ) -> None:
        self._plan: Plan = lowered.plan
        self._world, self.graphs = world, graphs
        self._draft_parameters = draft_parameters
        self._calls = 0
        self._specs = tap_specs(lowered)
        self._anchors = anchor_rule(lowered)
        self.run_options = {"attention": self._plan.attention}
        """Names of run-time choices, for `RunContext`."""
        self.taps: TapChannels | None = None
        if self._specs:
            self.taps = self._connect(self._plan.timeout_s)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.graphs.stage

    def micro_batches(self, checked: CheckedBatch, number: int) -> list[MicroBatch]:
        """Deal a batch; the same for every kind of call, so that its layout never differs."""
        dealt = deal(
            checked,
            num_micro_batches=number,
            max_tokens=self._plan.max_tokens_per_micro_batch,
            cp=self._plan.cp,
            anchors=self._anchors,
        )
        empty = padded_micro_batches(number, self.graphs.num_stages) - number
        nothing = take_documents(checked, [])
        spare = [make_micro_batch(nothing, self._plan.cp, self._anchors) for _ in range(empty)]
        return dealt + spare

    def run(
        self, micro_batches: list[MicroBatch], options: StepOptions, *, backward: bool
    ) -> StageRun:
        """Run all micro-batches through this rank's stage, by schedule or forward only."""
        orders = self._orders(len(micro_batches))
        if self.taps is not None and options.run_draft:
            self._calls += 1
            self.taps.begin_step(
                self._calls,
                [m.num_rows for m in micro_batches],
                depths=_depths(orders, self._specs),
                capacity_rows=self._most_rows(micro_batches),
            )
        run = StageRun(
            self.graphs,
            micro_batches,
            options,
            self._world.fabrics,
            self.taps,
            self._draft_parameters,
            self.run_options,
        )
        pp = self._world.fabrics["pp"]
        if backward:
            run_schedule(orders[self.stage], run, pp, target_grad=options.target_grad)
        else:
            run_forward(len(micro_batches), run, pp)
        return run

    def spread_logprobs(
        self, micro_batches: Sequence[MicroBatch], run: StageRun, num_tokens: int
    ) -> Tensor:
        """Give every stage the log-probs [T] of the last one, in the batch's order."""
        pp = self._world.fabrics["pp"]
        last = pp.size - 1
        double = next(self.graphs.policy.parameters()).dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        if pp.rank != last:
            return pp.recv((num_tokens,), dtype, last)
        out = torch.zeros(num_tokens, dtype=dtype, device=self._world.device)
        for mb, micro_batch in enumerate(micro_batches):
            out[micro_batch.batch.rows] = run.tokens[mb][0].to(dtype)
        for rank in range(last):
            pp.send(out, rank)
        pp.flush()
        return out

    def close(self) -> None:
        """Free the tap channels."""
        if self.taps is not None:
            self.taps.close()

    def _orders(self, number: int) -> list[list[Action]]:
        return build_schedule(self._plan.schedule, self.graphs.num_stages, number)

    def _most_rows(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Largest micro-batch of any dp replica: rings grow on all of them at once."""
        own = max(m.num_rows for m in micro_batches)
        if self._plan.dp == 1:
            return own
        return int(max(self._world.control.all_gather(own, deadline_s=self._plan.timeout_s)))

    def _connect(self, timeout_s: float) -> TapChannels:
        number = padded_micro_batches(self._plan.micro_batches, self.graphs.num_stages)
        place = self._world.coordinates
        return TapChannels.connect(
            self._world.control,
            self._specs,
            lane=f"dp{place.dp} cp{place.cp}",
            stage=self.stage,
            num_stages=self.graphs.num_stages,
            depths=_depths(self._orders(number), self._specs),
            capacity_rows=2,
            transport=self._plan.tap_transport,
            timeout_s=timeout_s,
            device=self._world.device,
        )


def tap_specs(lowered: LoweredStep) -> list[TapSpec]:
    """One description a source stage, the same on every rank."""
    values = lowered.facts.tap_values
    return [
        TapSpec(
            source=source,
            widths=tuple(v.width for v in values if v.source == source),
            dtypes=tuple(getattr(torch, v.dtype) for v in values if v.source == source),
            plan_hash=lowered.plan_hash,
        )
        for source in sorted({v.source for v in values})
    ]


def _depths(orders: list[list[Action]], specs: Sequence[TapSpec]) -> Mapping[int, int]:
    return {spec.source: tap_depth(orders, spec.source) for spec in specs}

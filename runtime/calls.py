"""One call of a model: micro-batches, schedule, taps, and the stage runs that they drive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.checked_batch import CheckedBatch, take_documents
from spec_compile.ir.dtypes import accumulator
from spec_compile.plan import Plan

from .balance import Balance
from .binding import LoweredStep, anchor_rule
from .executor import RankStages, run_forward, run_schedule
from .kernel_cost import DENSE, PAIRS, KernelCost, cost_on
from .micro_batch import MicroBatch, deal, make_micro_batch
from .schedule import Action, build_schedule, padded_micro_batches, tap_depths
from .stage_run import StageGraphs, StageRun, StepOptions
from .tap_measure import self_test
from .tap_slot import TapSpec
from .taps import TapChannels
from .world import World


class Caller:
    """Runs the graphs of a rank's stages over the micro-batches of one call after another."""

    def __init__(
        self,
        lowered: LoweredStep,
        world: World,
        graphs: Sequence[StageGraphs],
        draft_parameters: Sequence[Tensor],
    ) -> None:
        self._plan: Plan = lowered.plan
        self._world = world
        self.graphs = {graph.stage: graph for graph in graphs}
        """By stage, in order."""
        self._draft_parameters = draft_parameters
        self._calls = 0
        self._known_depths: dict[int, dict[int, int]] = {}
        self._specs = tap_specs(lowered)
        self._anchors = anchor_rule(lowered)
        self._attentions = lowered.facts.attentions
        self._kernels = self._agree_on_kernels()
        self.run_options = {"attention": self._plan.attention}
        """Names of run-time choices, for `RunContext`."""
        self.taps: TapChannels | None = None
        self.tap_speeds: dict[str, float] = {}
        """GB/s of every tap channel at the start, by name; empty within one process."""
        if self._specs:
            self.taps = self._connect(self._plan.timeout_s)
            lowered.tap_channels.update(self._channels_in_words(self.taps))

    @property
    def last(self) -> StageGraphs:
        """The last of this rank's stages."""
        return next(reversed(self.graphs.values()))

    def micro_batches(self, checked: CheckedBatch, number: int) -> list[MicroBatch]:
        """Deal a batch; the same for every kind of call, so that its layout never differs."""
        dealt = deal(
            checked,
            num_micro_batches=number,
            max_tokens=self._plan.max_tokens_per_micro_batch,
            cp=self._plan.cp,
            anchors=self._anchors,
            by_keys=self._plan.cp_strategy == "pass_q",
            kernels=self._kernels,
        )
        empty = self._padded(number) - number
        nothing = take_documents(checked, [])
        spare = [make_micro_batch(nothing, self._plan.cp, self._anchors) for _ in range(empty)]
        return dealt + spare

    def run(
        self, micro_batches: list[MicroBatch], options: StepOptions, *, backward: bool
    ) -> StageRun:
        """Run all micro-batches through this rank's stages, by schedule or forward only.

        Returns:
            The run of the rank's last stage: on the last rank, that with the losses.
        """
        orders = self._orders(len(micro_batches))
        if self.taps is not None and options.run_draft:
            self._calls += 1
            self.taps.begin_step(
                self._calls,
                [m.num_rows for m in micro_batches],
                depths=self._depths(orders),
                capacity_rows=self._most_rows(micro_batches),
            )
        fabrics, taps = self._world.fabrics, self.taps
        runs = {
            stage: StageRun(
                graphs,
                micro_batches,
                options,
                fabrics,
                taps,
                self._draft_parameters,
                self.run_options,
            )
            for stage, graphs in self.graphs.items()
        }
        pp = fabrics["pp"]
        mine = RankStages(runs, self._plan.num_stages, pp)
        if backward:
            run_schedule(orders[pp.rank], mine, target_grad=options.target_grad)
        else:
            run_forward(orders[pp.rank], mine)
        return runs[self.last.stage]

    def balance(self, micro_batches: Sequence[MicroBatch]) -> Balance:
        """How evenly the attention of all stages is spread over cp ranks."""
        parts = (m.balance(self._attentions) for m in micro_batches)
        return sum(parts, Balance())

    def spread_logprobs(
        self, micro_batches: Sequence[MicroBatch], run: StageRun, num_tokens: int
    ) -> Tensor:
        """Give every stage the log-probs [T] of the last one, in the batch's order."""
        pp = self._world.fabrics["pp"]
        last = pp.size - 1
        dtype = accumulator(next(self.last.policy.parameters()).dtype)
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

    def _agree_on_kernels(self) -> KernelCost:
        """What layouts even out: the time of this device's kernels, or pairs unless that is so on every rank."""
        if self._plan.cp == 1 or self._world.device.type != "cuda":
            return PAIRS
        given = self._plan.param_dtype
        dtype = getattr(torch, given) if given else next(self.last.policy.parameters()).dtype
        own = cost_on(self._world.device, dtype, self._attentions, self._plan.attention)
        replies = self._world.control.all_gather(
            own == DENSE, deadline_s=self._plan.entry_timeout_s
        )
        return DENSE if all(replies) else PAIRS

    def _orders(self, number: int) -> list[list[Action]]:
        plan = self._plan
        return build_schedule(plan.schedule, plan.pp, number, plan.num_stages // plan.pp)

    def _padded(self, number: int) -> int:
        return padded_micro_batches(self._plan.schedule, number, self._plan.pp)

    def _depths(self, orders: list[list[Action]]) -> dict[int, int]:
        """Slots of each tap channel; a search, so remembered by the number of micro-batches."""
        number = len(orders[0])
        if number not in self._known_depths:
            self._known_depths[number] = tap_depths(orders, [spec.source for spec in self._specs])
        return self._known_depths[number]

    def _most_rows(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Largest micro-batch of any dp replica: rings grow on all of them at once."""
        own = max(m.num_rows for m in micro_batches)
        if self._plan.dp == 1:
            return own
        return int(max(self._world.control.all_gather(own, deadline_s=self._plan.timeout_s)))

    def _connect(self, timeout_s: float) -> TapChannels:
        number = self._padded(self._plan.micro_batches)
        place = self._world.coordinates
        channels = TapChannels.connect(
            self._world.control,
            self._specs,
            lane=f"dp{place.dp} cp{place.cp}",
            stages=tuple(self.graphs),
            num_stages=self._plan.num_stages,
            depths=self._depths(self._orders(number)),
            capacity_rows=2,
            transport=self._plan.tap_transport,
            timeout_s=timeout_s,
            device=self._world.device,
        )
        self.tap_speeds = self_test(channels)
        return channels

    def _channels_in_words(self, taps: TapChannels) -> dict[str, str]:
        speeds = {name: f", {speed:.2f} GB/s" for name, speed in self.tap_speeds.items()}
        return {name: how + speeds.get(name, "") for name, how in taps.agreed.transports.items()}


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

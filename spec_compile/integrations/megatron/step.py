"""One step of the bridge: counts the micro-batches that hooks see, sends taps, and runs the draft."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.checked_batch import CheckedBatch
from spec_compile.errors import ConfigError
from spec_compile.lowering import Lowered
from spec_compile.runtime.anchors import AnchorRule
from spec_compile.runtime.micro_batch import MicroBatch, make_micro_batch
from spec_compile.runtime.stage_run import StageGraphs, StageRun, StepOptions, Sums
from spec_compile.runtime.world import World

from .rows import Placed, Sharding, place
from .silhouette import HIDDEN
from .taps import MegatronTaps


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """The micro-batches of a step, and where their rows lie in Megatron's activations."""

    micro_batches: list[MicroBatch]
    places: list[Placed]


@dataclass(frozen=True)
class Placing:
    """Lays micro-batches out as Megatron does."""

    sharding: Sharding
    anchors: AnchorRule | None

    def __call__(
        self, batches: Sequence[PackedBatch], checked: Sequence[CheckedBatch]
    ) -> PlacedStep:
        """Place each batch."""
        places = [place(b, c, self.sharding) for b, c in zip(batches, checked, strict=True)]
        made = [
            make_micro_batch(c, self.sharding.size, self.anchors, p.layout)
            for c, p in zip(checked, places, strict=True)
        ]
        return PlacedStep(made, places)


class DraftRun(StageRun):
    """The draft's part of a last stage whose policy runs elsewhere."""

    def run(self, micro_batch: int, crossing: list[Tensor]) -> None:
        """Run the draft forward and, in a training step, backward, on values of the policy."""
        self._crossing[micro_batch] = crossing
        self._run_draft(micro_batch)


class DraftStep:
    """What the hooks of a step share."""

    def __init__(
        self,
        lowered: Lowered,
        placed: PlacedStep,
        options: StepOptions,
        world: World,
        taps: MegatronTaps,
        parameters: Sequence[Tensor],
    ) -> None:
        self.options = options
        self._placed, self._taps = placed, taps
        self._cp = world.fabrics["cp"].rank
        self._dtype = taps.dtype
        self._seen: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._finished = 0
        self._held: defaultdict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)
        self._program = lowered.programs.draft
        self._stages = taps.stages
        self._run = (
            self._draft_run(lowered, world, parameters) if taps.last in self._stages else None
        )

    @property
    def sums(self) -> Sums:
        """The draft's raw sums, on the last stage."""
        return Sums() if self._run is None else self._run.sums

    def tapped(self, chunk: int, tap: int, hidden: Tensor) -> None:
        """Take a tap of the next micro-batch of its layer; send it when its stage has all."""
        micro_batch = self._seen[chunk, tap]
        self._seen[chunk, tap] += 1
        stage = self._stages[chunk]
        held = self._held[stage, micro_batch]
        held[tap] = self._rows(micro_batch, hidden)
        if stage != self._taps.last and len(held) == len(self._taps.by_stage[stage]):
            del self._held[stage, micro_batch]
            self._taps.push(stage, micro_batch, [held[t] for t in sorted(held)])

    def finished(self, hidden: Tensor, wanted: Sequence[int]) -> None:
        """Run the draft on the next micro-batch, whose final hidden state this is."""
        micro_batch = self._finished
        self._finished += 1
        assert self._run is not None
        rows = self._rows(micro_batch, hidden)
        values = {HIDDEN: rows, **self._held.pop((self._taps.last, micro_batch), {})}
        values |= self._taps.pull(micro_batch, rows)
        self._run.run(micro_batch, [self._shaped(i, values[w]) for i, w in enumerate(wanted)])

    def check_complete(self, is_last: bool) -> None:
        """Refuse a step in which the schedule ran other micro-batches than it was given.

        Raises:
            ConfigError: says how many were announced and seen.
        """
        number = len(self._placed.micro_batches)
        seen = {f"tap {tap} of chunk {chunk}": n for (chunk, tap), n in self._seen.items()}
        if is_last:
            seen["the last layer"] = self._finished
        wrong = {what: n for what, n in seen.items() if n != number}
        if wrong:
            raise ConfigError(
                f"step was given {number} micro-batches, but the model ran {wrong}; call the forward-backward "
                "function once inside the with block, with as many micro-batches"
            )

    def _rows(self, micro_batch: int, hidden: Tensor) -> Tensor:
        """Choose this rank's rows [n, D] out of local activations [s, b, D]."""
        if micro_batch >= len(self._placed.places):
            raise ConfigError(
                f"the model ran more micro-batches than the {len(self._placed.places)} that step was given"
            )
        placed = self._placed.places[micro_batch]
        if tuple(hidden.shape[:2]) != placed.local:
            raise ConfigError(
                f"micro-batch {micro_batch}: the model's activations are {tuple(hidden.shape)} [s, b, D], the batch "
                f"given to step stands for {placed.local}; give the padded form that the model runs on"
            )
        take = placed.takes[self._cp].to(hidden.device)
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, take).to(self._dtype)

    def _shaped(self, number: int, value: Tensor) -> Tensor:
        """Add the leading dimension that the captured graph has."""
        return value[None] if number in self._batched else value

    @property
    def _batched(self) -> set[int]:
        assert self._program is not None
        given = [n for n in self._program.graph.nodes if str(n.target).startswith("from_policy_")]
        return {i for i, node in enumerate(given) if node.meta["val"].ndim == 3}

    def _draft_run(self, lowered: Lowered, world: World, parameters: Sequence[Tensor]) -> DraftRun:
        assert self._program is not None
        graphs = StageGraphs(
            stage=self._taps.last,
            num_stages=self._taps.last + 1,
            policy=self._program,
            draft=self._program,
            stat_names=lowered.facts.stat_names,
            hidden_width=0,
            hidden_dtype=self._dtype,
        )
        return DraftRun(
            graphs,
            self._placed.micro_batches,
            self.options,
            world.fabrics,
            self._taps.channels,
            parameters,
            {"attention": lowered.plan.attention},
        )

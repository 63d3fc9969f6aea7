"""Tap channels between Megatron's stages: which stage gives which taps, and how many slots its schedule needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import PlanError
from spec_compile.plan import Plan
from spec_compile.runtime.schedule import build_schedule, padded_micro_batches, tap_depths
from spec_compile.runtime.taps import TapChannels, TapSpec
from spec_compile.runtime.world import World

from .chunks import Place
from .hooks import taps_of


class MegatronTaps:
    """This rank's ends of the channels that carry residual streams to the last stage."""

    def __init__(
        self,
        models: Sequence[Any],
        wanted: Sequence[int],
        world: World,
        place: Place,
        plan: Plan,
        plan_hash: str,
    ) -> None:
        config = models[0].config
        self.wanted = sorted(set(wanted))
        self.dtype: torch.dtype = config.params_dtype
        self._world, self._place, self._plan = world, place, plan
        self._group_size = config.microbatch_group_size_per_vp_stage or place.pp
        self._steps = 0
        self._known_depths: dict[int, dict[int, int]] = {}
        self.by_stage = self._gather(models)
        """Taps of each stage that has some, ascending; the last stage's stay where they are."""
        specs = [
            TapSpec(
                source=stage,
                widths=(config.hidden_size,) * len(taps),
                dtypes=(self.dtype,) * len(taps),
                plan_hash=plan_hash,
            )
            for stage, taps in sorted(self.by_stage.items())
            if stage != self.last
        ]
        self.channels = self._connect(specs) if specs else None

    @property
    def last(self) -> int:
        """The stage of the draft."""
        return self._place.num_stages - 1

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, by chunk."""
        return self._place.stages

    @property
    def sources(self) -> list[int]:
        """Stages that send, ascending."""
        return sorted(stage for stage in self.by_stage if stage != self.last)

    def begin_step(self, rows: Sequence[int]) -> None:
        """Open a step of micro-batches with these numbers of rows a rank."""
        if self.channels is None:
            return
        most = max(rows, default=0)
        if self._place.dp > 1:
            deadline_s = self._plan.timeout_s
            most = max(self._world.control.all_gather(most, deadline_s=deadline_s))
        self._steps += 1
        depths = self._depths(len(rows))
        self.channels.begin_step(self._steps, rows, depths=depths, capacity_rows=most)

    def push(self, stage: int, micro_batch: int, values: list[Tensor]) -> None:
        """Send a stage's taps, [n, D] each."""
        assert self.channels is not None
        self.channels.push(stage, micro_batch, values)

    def pull(self, micro_batch: int, like: Tensor) -> dict[int, Tensor]:
        """Receive all taps of earlier stages, each of the shape of ``like``."""
        found: dict[int, Tensor] = {}
        for stage in self.sources:
            assert self.channels is not None
            taps = self.by_stage[stage]
            values = self.channels.pull(stage, micro_batch, [like] * len(taps))
            found |= dict(zip(taps, values, strict=True))
        return found

    def close(self) -> None:
        """Free the channels."""
        if self.channels is not None:
            self.channels.close()

    def _gather(self, models: Sequence[Any]) -> dict[int, list[int]]:
        mine = {
            str(stage): taps_of(model, self.wanted)
            for stage, model in zip(self._place.stages, models, strict=True)
        }
        replies = self._world.control.all_gather(mine, deadline_s=self._plan.entry_timeout_s)
        found = {int(stage): taps for reply in replies for stage, taps in reply.items() if taps}
        missing = set(self.wanted) - {tap for taps in found.values() for tap in taps}
        if missing:
            raise PlanError(
                f"no stage has the layers of taps {sorted(missing)}; do the chunks hold the whole model?"
            )
        return found

    def _connect(self, specs: list[TapSpec]) -> TapChannels:
        place = self._place
        _, dp, cp, tp = place.rank
        return TapChannels.connect(
            self._world.control,
            specs,
            lane=f"dp{dp} cp{cp} tp{tp}",
            stages=place.stages,
            num_stages=place.num_stages,
            depths=self._depths(1),
            capacity_rows=2,
            transport=self._plan.tap_transport,
            timeout_s=self._plan.timeout_s,
            device=self._world.device,
        )

    def _depths(self, number: int) -> dict[int, int]:
        """Slots with which no push waits, from the order in which Megatron runs its chunks.

        The draft gives slots back in the last stage's forward, which these lists allow even earlier
        than its backward.
        """
        if number not in self._known_depths:
            self._known_depths[number] = self._count_slots(number)
        return self._known_depths[number]

    def _count_slots(self, number: int) -> dict[int, int]:
        pp, chunks = self._place.pp, self._place.num_chunks
        if chunks > 1 and (number % pp or self._group_size != pp):
            return dict.fromkeys(self.sources, max(1, number))  # another order than ours
        name = "interleaved" if chunks > 1 else "1f1b"
        padded = padded_micro_batches(name, number, pp)
        depths = tap_depths(build_schedule(name, pp, padded, chunks), self.sources)
        return {stage: max(1, min(depth, number)) for stage, depth in depths.items()}

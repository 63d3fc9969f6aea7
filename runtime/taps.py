"""Tap channels: features of earlier stages reach the draft outside the pipeline schedule.

The rank of the last stage owns one ring of slots per source stage. Sources, some of which may be on
that rank too, write into it one-sidedly, once per micro-batch. A stamp is
``step serial << 20 | push number``: what an aborted step left behind never matches a later one, and
nothing has to be reset.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from spec_compile.errors import ChannelError, ConfigError, InvariantError

from .fabric import Control
from .tap_ring import TapRing, TapSpec, make_header
from .tap_setup import SEGMENTS, Seat, agree_on_channels, map_rings

log = logging.getLogger(__name__)

__all__ = ["TapChannels", "TapSpec"]

_PUSH_BITS = 20
_MEASURE_STEP = -1
_MEASURE_BYTES = 1 << 26


class TapChannels:
    """This rank's ends of the tap channels of its pipeline; a `TapPort`. Made by `connect`.

    A step is ``begin_step`` on every rank, ``push`` on sources, and ``pull``, then ``release`` on
    the last stage. Pulled tensors on the CPU are the slots themselves: valid until ``release``.
    """

    rings: dict[int, TapRing]
    """By source stage: all of them where the last stage is, elsewhere those of this rank's sources."""

    def __init__(
        self,
        control: Control,
        specs: Sequence[TapSpec],
        *,
        lane: str,
        stages: tuple[int, ...],
        num_stages: int,
        timeout_s: float,
        device: torch.device,
        debug: bool,
    ) -> None:
        self.control = control
        self.specs = {spec.source: spec for spec in specs}
        self.seat = Seat(lane, stages, num_stages - 1)
        self.last = num_stages - 1
        self.timeout_s = timeout_s
        self.device = device
        self.debug = debug
        self.transport = "loopback"
        self.depths: dict[int, int] = {}
        self.capacity_rows = 0
        self.rings = {}
        self.step = 0
        self._serial = 0
        self._rows: list[int] = []
        self._pushed: defaultdict[int, list[int]] = defaultdict(list)
        self._pulled: defaultdict[int, list[int]] = defaultdict(list)
        self._released: set[int] = set()
        self._closed = False

    @classmethod
    def connect(
        cls,
        control: Control,
        specs: Sequence[TapSpec],
        *,
        lane: str,
        stages: tuple[int, ...],
        num_stages: int,
        depths: Mapping[int, int],
        capacity_rows: int,
        transport: str = "auto",
        timeout_s: float = 120.0,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> TapChannels:
        """Allocate the rings and map them at both ends. All ranks of ``control`` take part.

        Args:
            control: Carries segment names, and reports failure.
            specs: All channels of the pipeline, the same list on every rank.
            lane: Names this rank's pipeline, such as ``dp0 cp1``; channels join equal lanes.
            stages: This rank's stages.
            num_stages: Of all ranks; the last consumes.
            depths: Slots per source stage, from `tap_depths`.
            capacity_rows: Rows that slots hold at first, the same on every rank.
            transport: ``shm``, ``loopback``, or ``auto``: loopback when all ranks are threads of
                one process.
            timeout_s: Deadline of every wait, in seconds.
            device: Where `pull` puts values when ``like`` is on the meta device.
            debug: Checksum every payload, and poison released slots.

        Raises:
            ConfigError: The transport is unknown, or a channel starts at the last stage.
            ChannelError: Ranks disagree on the channels, or memory cannot be shared.
        """
        if transport not in ("auto", *SEGMENTS):
            raise ConfigError(f"expected tap transport auto, shm or loopback, found {transport!r}")
        self = cls(
            control,
            specs,
            lane=lane,
            stages=stages,
            num_stages=num_stages,
            timeout_s=timeout_s,
            device=torch.device(device),
            debug=debug,
        )
        for source in self.specs:
            if not 0 <= source < self.last:
                raise ConfigError(f"taps of stage {source} need no channel to stage {self.last}")
            if depths.get(source, 0) < 1:
                raise ConfigError(f"expected 1 slot or more for stage {source}, found {depths}")
        self.transport = agree_on_channels(control, specs, self.seat, transport, timeout_s)
        self._map_rings(capacity_rows, dict(depths))
        return self

    def begin_step(
        self,
        step: int,
        rows_per_micro_batch: Sequence[int],
        *,
        depths: Mapping[int, int] | None = None,
        capacity_rows: int | None = None,
    ) -> None:
        """Open a step. Call it on every rank; it communicates only when rings must grow.

        Args:
            step: Number for headers and messages.
            rows_per_micro_batch: Rows of every micro-batch on this rank, the same along a lane.
            depths: Slots that this step's schedule needs, the same on every rank; None: as before.
            capacity_rows: The most rows of a micro-batch on any rank, when lanes differ; None: this
                rank's own maximum.
        """
        self._check_open()
        if len(rows_per_micro_batch) >= 1 << _PUSH_BITS:
            raise ConfigError(f"at most {(1 << _PUSH_BITS) - 1} micro-batches fit in a step")
        rows = max([capacity_rows or 0, *rows_per_micro_batch])
        wanted = {s: max(d, (depths or {}).get(s, 0)) for s, d in self.depths.items()}
        if rows > self.capacity_rows or wanted != self.depths:
            if rows > self.capacity_rows:
                rows = max(rows, self.capacity_rows * 5 // 4)
            self._map_rings(max(rows, self.capacity_rows), wanted)
        self.step = step
        self._serial += 1
        self._rows = list(rows_per_micro_batch)
        self._pushed.clear()
        self._pulled.clear()
        self._released = set()
        if self.seat.consumes:
            for ring in self.rings.values():
                ring.credit = self._stamp(0)

    def push(self, source: int, micro_batch: int, values: list[Tensor]) -> None:
        """Write the taps of one micro-batch; returns when they are complete in the peer's slot.

        Raises:
            ChannelError: The values are not the announced ones, this micro-batch was pushed before,
                or the draft's stage gave no slot back in time.
        """
        self._check_open()
        where = self._where(source, micro_batch)
        if source not in self.seat.stages or source not in self.rings:
            raise InvariantError(f"{where}: {self._me()} has no such channel to push to")
        pushed = self._pushed[source]
        if micro_batch in pushed:
            raise ChannelError(f"{where}: pushed twice; a tap must stay outside recomputed regions")
        ring = self.rings[source]
        rows = self._rows_of(micro_batch, where)
        ring.spec.check(values, rows, where)
        number = len(pushed) + 1
        needed = self._stamp(max(0, number - ring.depth))
        self._wait(lambda: ring.credit, needed, where, "credit")
        header = make_header(ring.spec, self.step, micro_batch, rows)
        ring.write((number - 1) % ring.depth, self._stamp(number), header, values)
        pushed.append(micro_batch)

    def pull(self, source: int, micro_batch: int, like: list[Tensor]) -> list[Tensor]:
        """Wait for the taps of one micro-batch; valid until `release` of it.

        Raises:
            ChannelError: They did not come in time, or the slot holds something else.
        """
        self._check_open()
        where = self._where(source, micro_batch)
        if not self.seat.consumes or source not in self.rings:
            raise InvariantError(f"{where}: {self._me()} has no such channel to pull from")
        pulled = self._pulled[source]
        if micro_batch in pulled:
            raise ChannelError(f"{where}: pulled twice")
        ring = self.rings[source]
        rows = self._rows_of(micro_batch, where)
        ring.spec.check(like, rows, where)
        number = len(pulled) + 1
        slot = (number - 1) % ring.depth
        seen = self._wait(lambda: ring.stamp(slot), self._stamp(number), where, "stamp")
        if seen != self._stamp(number):
            raise ChannelError(
                f"{where}: the slot was overwritten: expected stamp {self._stamp(number)}, "
                f"found {seen}"
            )
        header = make_header(ring.spec, self.step, micro_batch, rows)
        values = ring.read(slot, header, like, where)
        pulled.append(micro_batch)
        return [self._placed(value, x) for value, x in zip(values, like, strict=True)]

    def release(self, micro_batch: int) -> None:
        """Give the slots of one micro-batch back to all sources. Does nothing on other ranks.

        Call it when the draft's backward of the micro-batch is through, before the target's
        gradient leaves; in a forward-only pass after the forward.

        Raises:
            ChannelError: The micro-batch was not pulled, or a slot was overwritten while in use.
        """
        self._check_open()
        for source, ring in self.rings.items() if self.seat.consumes else ():
            where = self._where(source, micro_batch)
            pulled = self._pulled[source]
            if micro_batch not in pulled or micro_batch in self._released:
                raise ChannelError(f"{where}: released without being pulled, or twice")
            number = pulled.index(micro_batch) + 1
            slot = (number - 1) % ring.depth
            if ring.stamp(slot) != self._stamp(number):
                raise ChannelError(
                    f"{where}: the slot was overwritten while in use: expected stamp "
                    f"{self._stamp(number)}, found {ring.stamp(slot)}"
                )
            if self.debug:
                ring.poison(slot)
        self._released.add(micro_batch)
        for source, ring in self.rings.items() if self.seat.consumes else ():
            returned = 0
            while self._pulled[source][returned : returned + 1] and (
                self._pulled[source][returned] in self._released
            ):
                returned += 1
            ring.credit = self._stamp(returned)

    def measure(self, num_micro_batches: int = 8) -> dict[str, float]:
        """Time every edge once, end to end: GB/s from push to a copy out of the slot.

        All ranks take part. The slowest lane counts. Edges that start on one rank share its time.

        Returns:
            GB/s by edge, such as ``{"0->2": 5.1}``, the same on every rank.
        """
        widest = max((s.offsets(1)[-1] for s in self.specs.values()), default=1)
        rows = max(2, min(self.capacity_rows, _MEASURE_BYTES // widest))
        self.begin_step(_MEASURE_STEP, [rows] * (num_micro_batches + 1))
        mine = {s: _zeros(spec, rows) for s, spec in self.specs.items() if s in self.seat.stages}
        outs = {s: _zeros(spec, rows) for s, spec in self.specs.items() if self.seat.consumes}
        start = 0.0
        for micro_batch in range(num_micro_batches + 1):
            for source, values in mine.items():
                self.push(source, micro_batch, values)
            for source, out in outs.items():
                for place, value in zip(out, self.pull(source, micro_batch, out), strict=True):
                    place.copy_(value)
            self.release(micro_batch)
            if micro_batch == 0:  # the first one warms up
                self._drain()
                start = time.perf_counter()
        self._drain()
        speeds = {}
        for source, values in mine.items():
            num_bytes = num_micro_batches * sum(value.nbytes for value in values)
            speeds[f"{source}->{self.last}"] = num_bytes / (time.perf_counter() - start) / 1e9
        slowest: dict[str, float] = {}
        for report in self.control.all_gather({"speeds": speeds}, deadline_s=self.timeout_s):
            for edge, speed in report["speeds"].items():
                slowest[edge] = min(speed, slowest.get(edge, speed))
        log.info("tap channels over %s: %s GB/s", self.transport, slowest)
        return slowest

    def close(self) -> None:
        """Drop the rings; idempotent. Tensors that were pulled keep their memory alive."""
        self._closed = True
        self.rings = {}

    def _wait(self, read: Callable[[], int], expected: int, where: str, what: str) -> int:
        """Poll a word until it reaches ``expected``; spin first, then sleep up to 0.5 ms."""
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0
        for turn in range(1 << 62):
            seen = read()
            if seen >= expected:
                return seen
            self.control.check()
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
            if turn > 50:
                pause = min(max(2e-5, 2 * pause), 5e-4)
        raise ChannelError(
            f"{where}: no {what} within {self.timeout_s} s: expected {expected} (push "
            f"{expected % (1 << _PUSH_BITS)} of this step), found {seen}; the other end stopped, "
            "or does not run the same schedule"
        )

    def _map_rings(self, capacity_rows: int, depths: dict[int, int]) -> None:
        sizes = {source: (depths[source], capacity_rows) for source in self.specs}
        self.rings = map_rings(
            self.control,
            SEGMENTS[self.transport](),
            self.specs,
            self.seat,
            sizes,
            timeout_s=self.timeout_s,
            debug=self.debug,
        )
        self.depths, self.capacity_rows = depths, capacity_rows

    def _drain(self) -> None:
        for source in self.seat.stages:
            if pushed := self._pushed[source]:
                ring = self.rings[source]
                where = self._where(source, pushed[-1])
                self._wait(
                    partial(getattr, ring, "credit"), self._stamp(len(pushed)), where, "credit"
                )

    def _placed(self, value: Tensor, like: Tensor) -> Tensor:
        device = self.device if like.device.type == "meta" else like.device
        return value if device.type == "cpu" else value.to(device)

    def _rows_of(self, micro_batch: int, where: str) -> int:
        if not 0 <= micro_batch < len(self._rows):
            raise ChannelError(f"{where}: the step has {len(self._rows)} micro-batches")
        return self._rows[micro_batch]

    def _stamp(self, number: int) -> int:
        return self._serial << _PUSH_BITS | number

    def _where(self, source: int, micro_batch: int) -> str:
        return (
            f"tap channel {source}->{self.last} ({self.seat.lane}), step {self.step}, "
            f"micro-batch {micro_batch}"
        )

    def _me(self) -> str:
        return f"the rank of stages {', '.join(map(str, self.seat.stages))}"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelError(f"the tap channels of {self._me()} ({self.seat.lane}) are closed")


def _zeros(spec: TapSpec, rows: int) -> list[Tensor]:
    pairs = zip(spec.widths, spec.dtypes, strict=True)
    return [torch.zeros(rows, width, dtype=dtype) for width, dtype in pairs]

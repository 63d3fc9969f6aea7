"""Tap channels: features of earlier stages reach the draft outside the pipeline schedule.

The rank of the last stage owns one ring of slots per source stage. Sources, some of which may be on
that rank too, write into it one-sidedly, once per micro-batch. A stamp is
``step serial << 20 | push number``: what an aborted step left behind never matches a later one, and
nothing has to be reset.

Slots are used in place and held until the draft's backward of the micro-batch is through: the draft
runs forward and backward in one go, right after the target's backward, so a copy would cost memory
and time and free nothing earlier than the depth of the ring already allows for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spec_compile.errors import ChannelError, ConfigError, InvariantError

from .fabric import Control
from .tap_setup import Agreed, Rings, Seat, agree_on_channels, map_rings, open_transports
from .tap_slot import Header, TapSpec, checksum
from .tap_transport import PUSH_BITS, RingLayout, Setting, TapTransport, Wait
from .tap_transports import transport_names
from .timeline import span

__all__ = ["TapChannels", "TapSpec"]


class TapChannels:
    """This rank's ends of the tap channels of its pipeline; a `TapPort`. Made by `connect`.

    A step is ``begin_step`` on every rank, ``push`` on sources, and ``pull``, then ``release`` on
    the last stage. Pulled tensors are the slots themselves, where those are on the rank's device:
    valid until ``release``.
    """

    agreed: Agreed
    rings: Rings

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
        self.depths: dict[int, int] = {}
        self.capacity_rows = 0
        self.rings = Rings({}, {})
        self.step = 0
        self._transports: dict[str, TapTransport] = {}
        self._serial = 0
        self._rows: list[int] = []
        self._pushed: defaultdict[int, set[int]] = defaultdict(set)
        self._pulled: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by which push
        self._held: defaultdict[int, deque[int]] = defaultdict(deque)  # in the order of the pushes
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
            control: Carries handles of memory, and reports failure.
            specs: All channels of the pipeline, the same list on every rank.
            lane: Names this rank's pipeline, such as ``dp0 cp1``; channels join equal lanes.
            stages: This rank's stages.
            num_stages: Of all ranks; the last consumes.
            depths: Slots per source stage, from `tap_depths`.
            capacity_rows: Rows that slots hold at first, the same on every rank.
            transport: A name that `transport_names` lists, or ``auto``: by process, host and device.
            timeout_s: Deadline of every wait, in seconds.
            device: Where taps are pushed from and pulled to.
            debug: Checksum every payload, and poison released slots.

        Raises:
            ConfigError: The transport is unknown or lacks a package, or a channel starts at the last
                stage.
            ChannelError: Ranks disagree on the channels, or memory cannot be shared.
        """
        if transport not in ("auto", *transport_names()):
            known = ", ".join(("auto", *transport_names()))
            raise ConfigError(f"expected a tap transport out of {known}, found {transport!r}")
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
        self.agreed = agree_on_channels(
            control, specs, self.seat, transport, self.device, timeout_s
        )
        setting = Setting(control, self.device, timeout_s, self.agreed.pipelines)
        self._transports = open_transports(setting, self.agreed)
        try:
            self.resize(dict(depths), capacity_rows)
        except BaseException:
            self.close()
            raise
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
        if len(rows_per_micro_batch) >= 1 << PUSH_BITS:
            raise ConfigError(f"at most {(1 << PUSH_BITS) - 1} micro-batches fit in a step")
        rows = max([capacity_rows or 0, *rows_per_micro_batch])
        wanted = {s: max(d, (depths or {}).get(s, 0)) for s, d in self.depths.items()}
        if rows > self.capacity_rows or wanted != self.depths:
            if rows > self.capacity_rows:
                rows = max(rows, self.capacity_rows * 5 // 4)
            self.resize(wanted, max(rows, self.capacity_rows))
        self.step = step
        self._serial += 1
        self._rows = list(rows_per_micro_batch)
        self._pushed.clear()
        self._pulled.clear()
        self._held.clear()
        self._released = set()
        for writer in self.rings.writers.values():
            writer.begin(self._stamp(0), len(self._rows))
        for reader in self.rings.readers.values():
            reader.begin(self._stamp(0), len(self._rows))
            reader.give_credit(self._stamp(0))

    def push(self, source: int, micro_batch: int, values: list[Tensor]) -> None:
        """Write the taps of one micro-batch; returns when ``values`` may change.

        Raises:
            ChannelError: The values are not the announced ones, this micro-batch was pushed before,
                or the draft's stage gave no slot back in time.
        """
        self._check_open()
        wait = self._wait(source, micro_batch)
        if source not in self.rings.writers:
            raise InvariantError(f"{wait}: {self._me()} has no such channel to push to")
        pushed = self._pushed[source]
        if micro_batch in pushed:
            raise ChannelError(f"{wait}: pushed twice; a tap must stay outside recomputed regions")
        spec, ring = self.specs[source], self.rings.writers[source]
        rows = self._rows_of(micro_batch, wait)
        spec.check(values, rows, wait)
        number, depth = len(pushed) + 1, self.depths[source]
        with span("credit", source, micro_batch):
            ring.wait_credit(self._stamp(max(0, number - depth)), wait)
        header = Header.of(spec, self.step, micro_batch, rows)
        if self.debug:
            header = header._replace(checksum=checksum(values))
        with span("push", source, micro_batch):
            ring.push((number - 1) % depth, self._stamp(number), header.pack(), values, wait)
        pushed.add(micro_batch)

    def pull(self, source: int, micro_batch: int, like: list[Tensor]) -> list[Tensor]:
        """Wait for the taps of one micro-batch; valid until `release` of it.

        Raises:
            ChannelError: They did not come in time, or the slot holds something else.
        """
        self._check_open()
        wait = self._wait(source, micro_batch)
        if source not in self.rings.readers:
            raise InvariantError(f"{wait}: {self._me()} has no such channel to pull from")
        pulled = self._pulled[source]
        if micro_batch in pulled:
            raise ChannelError(f"{wait}: pulled twice")
        spec, ring = self.specs[source], self.rings.readers[source]
        rows = self._rows_of(micro_batch, wait)
        spec.check(like, rows, wait)
        number = len(pulled) + 1
        slot, stamp = (number - 1) % self.depths[source], self._stamp(number)
        with span("stamp", source, micro_batch):
            seen = ring.wait_stamp(slot, stamp, wait)
        if seen != stamp:
            raise ChannelError(
                f"{wait}: the slot was overwritten: expected stamp {stamp}, found {seen}"
            )
        header = Header.of(spec, self.step, micro_batch, rows).check(ring.header(slot), wait)
        values = ring.values(slot, rows, like)
        if cut := ring.cut(slot, seen, rows):
            raise ChannelError(
                f"{wait}: the payload is cut short: values {cut} of {len(values)} have not come "
                "whole although their stamp has"
            )
        if header.checksum and header.checksum != checksum(values):
            raise ChannelError(f"{wait}: the payload is torn: its checksum differs")
        pulled[micro_batch] = number
        self._held[source].append(micro_batch)
        return values

    def release(self, micro_batch: int, sources: Sequence[int] | None = None) -> None:
        """Give the slots of one micro-batch back. Does nothing on ranks without the last stage.

        Call it when the draft's backward of the micro-batch is through, before the target's
        gradient leaves; in a forward-only pass after the forward.

        Args:
            micro_batch: Which one.
            sources: The stages that have pushed it; None: all.

        Raises:
            ChannelError: The micro-batch was not pulled, or a slot was overwritten while in use.
        """
        self._check_open()
        rings = self.rings.readers
        sources = [s for s in rings if sources is None or s in sources]
        for source in sources:
            self._check_in_use(source, micro_batch)
            if self.debug:
                rings[source].poison(self._slot_of(source, micro_batch))
        self._released.add(micro_batch)
        for source in sources:
            held = self._held[source]
            while held and held[0] in self._released:
                held.popleft()
            rings[source].give_credit(self._stamp(len(self._pulled[source]) - len(held)))

    def _check_in_use(self, source: int, micro_batch: int) -> None:
        pulled = self._pulled[source]
        if micro_batch not in pulled or micro_batch in self._released:
            where = self._wait(source, micro_batch)
            raise ChannelError(f"{where}: released without being pulled, or twice")
        seen = self.rings.readers[source].stamp(self._slot_of(source, micro_batch))
        expected = self._stamp(pulled[micro_batch])
        if seen != expected:
            raise ChannelError(
                f"{self._wait(source, micro_batch)}: the slot was overwritten while in use: expected "
                f"stamp {expected}, found {seen}"
            )

    def _slot_of(self, source: int, micro_batch: int) -> int:
        return (self._pulled[source][micro_batch] - 1) % self.depths[source]

    def resize(self, depths: Mapping[int, int], capacity_rows: int) -> None:
        """Replace all rings; every rank calls it, between two steps."""
        self.rings.close()
        self.rings = Rings({}, {})
        layouts = {s: RingLayout(self.specs[s], depths[s], capacity_rows) for s in self.specs}
        self.rings = map_rings(self.control, self._transports, self.agreed, layouts, self.timeout_s)
        self.depths, self.capacity_rows = dict(depths), capacity_rows

    def close(self) -> None:
        """Drop the rings; idempotent. Tensors that were pulled keep their memory alive."""
        self._closed = True
        self.rings.close()
        self.rings = Rings({}, {})
        for transport in self._transports.values():
            transport.close()
        self._transports = {}

    def _rows_of(self, micro_batch: int, where: Wait) -> int:
        if not 0 <= micro_batch < len(self._rows):
            raise ChannelError(f"{where}: the step has {len(self._rows)} micro-batches")
        return self._rows[micro_batch]

    def _stamp(self, number: int) -> int:
        return self._serial << PUSH_BITS | number

    def _wait(self, source: int, micro_batch: int) -> Wait:
        channel = (source, self.last, self.seat.lane)
        return Wait(channel, self.step, micro_batch, self.control, self.timeout_s)

    def _me(self) -> str:
        return f"the rank of stages {', '.join(map(str, self.seat.stages))}"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelError(f"the tap channels of {self._me()} ({self.seat.lane}) are closed")

"""The world of threads in one process: real waits and failures, and a start in milliseconds."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ChannelError, InvariantError
from spec_compile.plan import Plan

from .collectives import COLLECTIVE, Message, PairwiseFabric
from .failure import FailureLatch, FailureWord
from .mesh import to_json
from .solo import SoloFabric
from .world import World, coordinates, own_groups

Box = tuple[str, int, int, int]
"""Fabric name, source and destination (global ranks), lane."""


class Hub:
    """What the ranks share: mail boxes, entries of gathers, who has left, and the first failure."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.latch = FailureLatch()
        self.mail: defaultdict[Box, deque[Tensor]] = defaultdict(deque)
        self.entries: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self.left: set[int] = set()
        self.latch.subscribe(self.wake)

    def wake(self) -> None:
        """Let every wait look again."""
        with self.changed:
            self.changed.notify_all()

    def wait(self, missing: Callable[[], list[int]], what: str, deadline_s: float) -> None:
        """Wait, with ``changed`` held, until no global rank is missing.

        Raises:
            ChannelError: the deadline passed, or a missing rank has left; names the ranks.
        """
        end = time.monotonic() + deadline_s
        while True:
            self.latch.check()
            ranks = missing()
            if not ranks:
                return
            gone = [rank for rank in ranks if rank in self.left]
            if gone:
                raise ChannelError(
                    f"{what}: ranks {gone} closed their model while this rank waited for them"
                )
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise ChannelError(
                    f"{what}: waited {deadline_s:g} s for ranks {ranks}, which did not come"
                )
            self.changed.wait(left_s)


class ThreadControl:
    """A `Control` between threads of one process."""

    def __init__(self, rank: int, hub: Hub) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._sequence = 0

    def all_gather(self, payload: Any, *, deadline_s: float) -> list[Any]:
        """Give every rank the list of all ranks' payloads, in rank order."""
        hub, number = self._hub, self._sequence
        text = to_json(payload)
        self._sequence += 1
        with hub.changed:
            entries = hub.entries[number]
            entries[self.rank] = text
            hub.changed.notify_all()
            hub.wait(
                lambda: [r for r in range(self.size) if r not in entries],
                f"all_gather {number} of rank {self.rank}",
                deadline_s,
            )
            hub.entries.pop(number - 1, None)  # whoever came here has left the one before
        return [json.loads(entries[r]) for r in range(self.size)]

    def fail(self, error: BaseException) -> None:
        """Publish the failure word; never blocks or raises."""
        self._hub.latch.set(FailureWord.of(error, self.rank))

    def check(self) -> None:
        """Raise the published failure, if any."""
        self._hub.latch.check()

    def close(self) -> None:
        """Leave; idempotent."""
        with self._hub.changed:
            self._hub.left.add(self.rank)
            self._hub.changed.notify_all()


class ThreadFabric(PairwiseFabric):
    """A group of threads; messages are copies, so sender and receiver never share memory."""

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, device: torch.device, hub: Hub
    ) -> None:
        super().__init__(name, list(ranks).index(rank), len(ranks), device, hub.latch)
        self._ranks = list(ranks)
        self._hub = hub

    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for dst, x in sends:
            self._post(x, dst, COLLECTIVE)
        for src, out in receives:
            self._take(out, src, COLLECTIVE)

    def _post(self, x: Tensor, dst: int, lane: int) -> None:
        copy = x.clone()
        with self._hub.changed:
            self._hub.mail[self._box(self.rank, dst, lane)].append(copy)
            self._hub.changed.notify_all()

    def _take(self, out: Tensor, src: int, lane: int) -> None:
        with self._hub.changed:
            # only with the lock held: two ranks that meet here would make a box each, and lose a message
            box = self._hub.mail[self._box(src, self.rank, lane)]
            self._wait(lambda: [] if box else [self._ranks[src]], f"tensor from its rank {src}")
            value = box.popleft()
            self._hub.changed.notify_all()
        if value.shape.numel() != out.numel() or value.dtype != out.dtype:
            raise ChannelError(
                f"fabric {self.name!r}: rank {self.rank} expected {tuple(out.shape)} {out.dtype} "
                f"from rank {src}, found {tuple(value.shape)} {value.dtype}"
            )
        out.copy_(value.view(out.shape))

    def _drain(self) -> None:
        own = self._ranks[self.rank]

        def waiting() -> list[int]:
            mail = self._hub.mail.items()
            return [box[2] for box, full in mail if full and box[:2] == (self.name, own)]

        self._wait(waiting, "peers to take what was sent")

    def _wait(self, missing: Callable[[], list[int]], what: str) -> None:
        channel = f"fabric {self.name!r} on its rank {self.rank} of {self.size}, {what}"
        try:
            with self._hub.changed:
                self._hub.wait(missing, channel, self._hub.timeout_s)
        except Exception as error:
            self._broken = str(error)
            raise

    def _box(self, src: int, dst: int, lane: int) -> Box:
        return (self.name, self._ranks[src], self._ranks[dst], lane)


def thread_worlds(plan: Plan, device: torch.device | None = None) -> list[World]:
    """Build the worlds of all ranks of ``plan``, each to be used by one thread."""
    device = device or torch.device("cpu")
    hub = Hub(plan.world_size, plan.timeout_s)
    return [_thread_world(plan, rank, device, hub) for rank in range(plan.world_size)]


def _thread_world(plan: Plan, rank: int, device: torch.device, hub: Hub) -> World:
    fabrics: dict[str, PairwiseFabric] = {}
    for name, ranks in own_groups(plan, rank).items():
        if len(ranks) == 1:
            fabrics[name] = SoloFabric(name, device, hub.latch)
        else:
            fabrics[name] = ThreadFabric(name, ranks, rank, device, hub)
    if "cp" not in fabrics:
        raise InvariantError(f"rank {rank} is in no cp group of a plan of {plan.world_size} ranks")
    control = ThreadControl(rank, hub)
    return World(rank, plan.world_size, device, control, coordinates(plan, rank), fabrics)

"""Random faults of a pipeline with taps: what goes wrong where, and how every rank must end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

import spec_compile as sc
from spec_compile.runtime.stage_run import StageRun
from spec_compile.runtime.tap_slot import HEADER_BYTES
from spec_compile.runtime.taps import TapChannels
from tests.oracle import DenseResult

from .prepared import (
    Ended,
    Prepared,
    Story,
    assert_ended,
    batch_of,
    good_step,
    play,
    policy_loss,
)

TIMEOUT_S = 2.0
MARGIN_S = 8.0
"""What a busy machine may add until a rank has ended."""
ATTEMPTS = 4
STARVED_S = TIMEOUT_S / 4
"""Seconds that a rank is ready to run and has no core, from which on its peer may find it late."""
SILENT = re.compile(r"rank (\d) (?:stopped: rank|was stopped for)")
SETUP_TIMEOUT_S = 30.0
"""``Plan.timeout_s`` until the fault; `TIMEOUT_S` from then on."""
MICRO_BATCHES = 3
SOURCE, READER = 0, 1
PLACES = ("forward", "backward", "push", "pull", "release")
ENDS_OF = {SOURCE: ("forward", "backward", "push"), READER: PLACES[:2] + PLACES[3:]}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one rank."""

    kind: str
    transport: str
    rank: int
    place: str
    """What the rank is doing."""
    micro_batch: int
    after: bool
    """Once it has done it, not before."""
    seed: int


def draw(seed: int) -> Fault:
    """Choose a fault; equal seeds give equal faults where the same packages are installed."""
    dice = random.Random(seed)
    kinds = tuple(CHECKS)
    kind = kinds[seed % len(kinds)]
    nixl = ["nixl"] if importlib.util.find_spec("nixl_cu13") is not None else []
    rank = dice.choice((SOURCE, READER))
    place = dice.choice(ENDS_OF[rank])
    if kind in SPOILS:
        rank, place = SOURCE, "push"
    return Fault(
        kind=kind,
        transport=dice.choice(["shm", "shm", "c10d", *nixl]),
        rank=rank,
        place=place,
        micro_batch=dice.randrange(MICRO_BATCHES),
        after=dice.random() < 0.5,
        seed=seed,
    )


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def oversleep() -> None:
    time.sleep(2.5 * TIMEOUT_S)


@contextlib.contextmanager
def harmed(fault: Fault, harm: Callable[[], None]) -> Iterator[None]:
    """Do harm at the fault's place, once."""
    owner: Any = StageRun if fault.place in ("forward", "backward") else TapChannels
    original = getattr(owner, fault.place)
    calls = []

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        mine = len(calls) - 1 == fault.micro_batch
        if mine and not fault.after:
            harm()
        result = original(self, *args, **kwargs)
        if mine and fault.after:
            harm()
        return result

    with mock.patch.object(owner, fault.place, hooked):
        yield


@contextlib.contextmanager
def delayed(fault: Fault) -> Iterator[None]:
    """Sleep a little, at random, everywhere."""
    dice = random.Random(fault.seed)
    with contextlib.ExitStack() as stack:
        for place in PLACES:
            owner: Any = StageRun if place in ("forward", "backward") else TapChannels
            original = getattr(owner, place)

            def hooked(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                time.sleep(dice.random() * 0.05)
                return _original(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(owner, place, hooked))
        yield


Push = Callable[[int, int, bytes, Sequence[Tensor], Any], None]
"""`TapWriter.push`."""


def old_stamp(push: Push, slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
    """The stamp of the push before, again."""
    push(slot, stamp - 1, header, values, wait)


def future_stamp(push: Push, slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
    """A stamp that nobody expects yet."""
    push(slot, stamp + 2, header, values, wait)


def torn_header(push: Push, slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
    """Half a header."""
    half = HEADER_BYTES // 2
    push(slot, stamp, header[:half] + bytes(HEADER_BYTES - half), values, wait)


def truncated(push: Push, slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
    """Writing stops after some rows; header and stamp tell of all of them."""
    push(slot, stamp, header, [value[: len(value) // 2] for value in values], wait)


def lost(push: Push, slot: int, stamp: int, header: bytes, values: Any, wait: Any) -> None:
    """Nothing arrives."""


RING_SPOILS = {
    "old stamp": old_stamp,
    "future stamp": future_stamp,
    "torn header": torn_header,
    "truncated slot": truncated,
    "lost push": lost,
}


@contextlib.contextmanager
def spoiled(fault: Fault) -> Iterator[None]:
    """Let one push of the source go wrong."""
    original = TapChannels.push

    def hooked(self: TapChannels, source: int, micro_batch: int, values: list[Tensor]) -> None:
        if micro_batch != fault.micro_batch:
            original(self, source, micro_batch, values)
        elif fault.kind == "old step":
            with mock.patch.object(self, "step", self.step - 1):
                original(self, source, micro_batch, values)
        elif fault.kind in RING_SPOILS:
            ring = self.rings.writers[source]
            spoil = functools.partial(RING_SPOILS[fault.kind], ring.push)
            with mock.patch.object(ring, "push", spoil):
                original(self, source, micro_batch, values)

    with mock.patch.object(TapChannels, "push", hooked):
        yield


LATE = r"no (stamp|credit) within|missed its deadline|waited 2 s for ranks"
CHECKS: dict[str, str] = {
    "kill": r"rank {rank} died",
    "stop": r"rank {rank} (was )?stopped",
    "late": LATE,
    "delay": "",
    "other plan": r"lowered different graphs",
    "other taps": r"rank \d .* has other tap channels",
    "old stamp": rf"{{channel}}.*({LATE}|overwritten: expected stamp)",
    "future stamp": r"{channel}.*overwritten: expected stamp",
    "torn header": r"{channel}.*header is torn",
    "truncated slot": r"{channel}.*payload is cut short",
    "lost push": rf"{{channel}}.*({LATE}|overwritten: expected stamp)|{LATE}",
    "skipped micro-batch": rf"{{any_channel}}.*micro_batch: expected|{LATE}",
    "old step": r"{channel}.*step: expected 2, found 1",
}
"""By kind: what the message of every rank that lives says; empty: nothing may go wrong."""
SPOILS = (*RING_SPOILS, "skipped micro-batch", "old step")
HARMS = {"kill": kill, "stop": stop, "late": oversleep}


def story_of(fault: Fault, prepared: Prepared, expected: DenseResult) -> Story:
    """A first good step, then the one in which it goes wrong; plans differ from the start on."""
    chosen = for_fault(fault, prepared)

    def before(rank: int) -> Any:
        if fault.kind.startswith("other"):
            return None
        model = chosen.parallelize()
        good_step(model, expected)
        return model

    def go_wrong(rank: int, model: Any) -> None:
        if fault.kind in HARMS or fault.kind in SPOILS:
            hasten(model)
        if model is None:
            differing(fault, chosen, rank).parallelize().step(batch_of(0), policy_loss)
            return
        context: Any = contextlib.nullcontext()
        if fault.kind == "delay":
            context = delayed(fault)
        elif rank == fault.rank:
            harms = fault.kind in HARMS
            context = harmed(fault, HARMS[fault.kind]) if harms else spoiled(fault)
        with context:
            good_step(model, expected)
        model.close()

    during = functools.partial(wake, fault.rank) if fault.kind == "stop" else None
    return Story(before, go_wrong, during)


def for_fault(fault: Fault, prepared: Prepared) -> Prepared:
    """The prepared step with the fault's transport, which no graph depends on."""
    plan = dataclasses.replace(prepared.plan, tap_transport=fault.transport)
    lowered = dataclasses.replace(prepared.lowered, plan=plan)
    return dataclasses.replace(prepared, plan=plan, lowered=lowered)


def hasten(model: Any) -> None:
    """Lower the deadlines once everything is set up: what takes long on a busy machine is the start."""
    world, taps = model._world, model._caller.taps
    model.plan = dataclasses.replace(model.plan, timeout_s=TIMEOUT_S)
    world.control._timeout_s = taps.timeout_s = TIMEOUT_S
    own = [t._fabrics for t in taps._transports.values() if hasattr(t, "_fabrics")]
    for fabrics in (world.fabrics, *own):
        for fabric in fabrics.values():
            if hasattr(fabric, "_timeout_s"):
                fabric._timeout_s = TIMEOUT_S


def differing(fault: Fault, chosen: Prepared, rank: int) -> Prepared:
    """What a rank binds that was built from something else."""
    if rank != fault.rank:
        return chosen
    lowered = chosen.lowered
    if fault.kind == "other plan":
        lowered = dataclasses.replace(lowered, plan_hash="another")
    else:
        taps = tuple(dataclasses.replace(t, width=t.width + 1) for t in lowered.facts.tap_values)
        lowered = dataclasses.replace(
            lowered, facts=dataclasses.replace(lowered.facts, tap_values=taps)
        )
    return dataclasses.replace(chosen, lowered=lowered)


def wake(rank: int, pids: list[int]) -> None:
    """Let a stopped rank go on when all others should have ended."""
    state = Path(f"/proc/{pids[rank]}/stat")
    end = time.monotonic() + 30
    while time.monotonic() < end and state.exists():
        if state.read_text(encoding="ascii").rpartition(") ")[2][0] == "T":
            time.sleep(TIMEOUT_S + 1)
            os.kill(pids[rank], signal.SIGCONT)
            return
        time.sleep(0.02)


def check(fault: Fault, ends: Sequence[Ended]) -> None:
    """Every rank ended as it must: in time, with an error that says what went wrong where."""
    edge = r"tap channel 0->1 \(dp0 cp0\), step 2, micro-batch "
    pattern = CHECKS[fault.kind].format(
        rank=fault.rank, channel=f"{edge}{fault.micro_batch}", any_channel=edge
    )
    for rank, end in enumerate(ends):
        if not pattern:
            assert end.error is None, f"{fault}\n{end.outcome.text}"
        elif fault.kind == "kill" and rank == fault.rank:
            assert end.outcome.exitcode == -signal.SIGKILL, fault
        else:
            if fault.kind == "stop" and rank == fault.rank and end.error is None:
                continue  # its last message had left before it stopped; its result was compared
            kind = sc.PlanError if fault.kind == "other plan" else sc.ChannelError
            within_s = 3 * TIMEOUT_S + MARGIN_S
            assert_ended(end, kind, "", within_s=within_s)
            stopped = fault.kind == "stop" and rank == fault.rank
            wanted = "stopped" if stopped else pattern
            assert re.search(wanted, end.text, re.DOTALL), f"{fault}\n{wanted}\n{end.text}"


def inject(fault: Fault, prepared: Prepared, expected: DenseResult) -> None:
    """Run one fault in two processes and check how they end.

    Deadlines of two seconds are shorter than a busy machine may keep a healthy rank from running, and
    its peer is right to give it up then. Such a run says nothing about the fault and is repeated; no
    other is, whatever it says.
    """
    for attempt in range(ATTEMPTS):
        ends = play(story_of(fault, prepared, expected), world_size=2, limit_s=60.0)
        if attempt == ATTEMPTS - 1 or not starved(fault, ends):
            break
    check(fault, ends)


def starved(fault: Fault, ends: Sequence[Ended]) -> bool:
    """Whether a healthy rank missed a deadline while, as the kernel tells, it waited for a core."""
    healthy = [end for end in ends if end.outcome.rank != fault.rank or fault.kind not in HARMS]
    return missed(fault, ends) and max(end.waited_s for end in healthy) > STARVED_S


def missed(fault: Fault, ends: Sequence[Ended]) -> bool:
    """Whether a rank was given up that does no harm."""
    text = "\n".join(end.text for end in ends)
    silent = {match.group(1) for match in SILENT.finditer(text)}
    if fault.kind == "stop":  # it goes on again before a starved peer has looked: nothing is wrong
        return bool(silent - {str(fault.rank)}) or all(end.error is None for end in ends)
    late = LATE not in CHECKS[fault.kind] and re.search(LATE, text) is not None
    return bool(silent) or (late and fault.kind != "kill")

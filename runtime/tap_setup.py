"""How the ends of tap channels find each other: agreement on the list, then shared rings."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_compile.errors import ChannelError

from .fabric import Control
from .loopback import Loopback
from .shared_memory import SharedMemory
from .tap_ring import Segments, TapRing, TapSpec, ring_bytes, specs_digest

SEGMENTS: dict[str, type[Segments]] = {"shm": SharedMemory, "loopback": Loopback}
"""Transports by the name that `Plan.tap_transport` gives them."""

_PROCESS = secrets.token_hex(8)


@dataclass(frozen=True)
class Seat:
    """Where a rank sits: its pipeline and its stages."""

    lane: str
    """Name of its pipeline; channels join equal lanes."""
    stages: tuple[int, ...]
    last: int
    """The stage that consumes."""

    @property
    def consumes(self) -> bool:
        """Whether the draft's stage is here."""
        return self.last in self.stages


def agree_on_channels(
    control: Control, specs: Sequence[TapSpec], seat: Seat, transport: str, timeout_s: float
) -> str:
    """Check that all ranks have the same channels, and resolve ``auto``.

    Returns:
        ``loopback`` for ``auto`` when all ranks are threads of one process, else ``shm``.

    Raises:
        ChannelError: Ranks disagree on the list of channels.
    """
    # The pid tells forked processes apart, the token processes of different pid namespaces.
    hello = {
        "specs": specs_digest(specs),
        "stages": list(seat.stages),
        "process": f"{os.getpid()} {_PROCESS}",
    }
    hellos = control.all_gather(hello, deadline_s=timeout_s)
    for rank, other in enumerate(hellos):
        if other["specs"] != hello["specs"]:
            raise ChannelError(
                f"rank {rank} (stages {other['stages']}) has other tap channels than rank "
                f"{control.rank} (stages {list(seat.stages)}); every rank must lower the same plan"
            )
    if transport != "auto":
        return transport
    one_process = all(other["process"] == hello["process"] for other in hellos)
    return "loopback" if one_process else "shm"


def map_rings(
    control: Control,
    segments: Segments,
    specs: Mapping[int, TapSpec],
    seat: Seat,
    sizes: Mapping[int, tuple[int, int]],
    *,
    timeout_s: float,
    debug: bool,
) -> dict[int, TapRing]:
    """Allocate rings at the last stage and map them at their sources; all ranks take part.

    Names are gone again when this returns or raises, so that a kill later on leaves nothing.

    Args:
        control: Carries the names.
        segments: Where memory comes from.
        specs: All channels, by source stage.
        seat: This rank's place.
        sizes: Depth and capacity in rows of each ring, by source stage.
        timeout_s: Deadline of each exchange, in seconds.
        debug: Passed to the rings.

    Returns:
        All rings where the last stage is, which serves both ends of its own rank's sources there; else
        those of this rank's sources.

    Raises:
        ChannelError: Some rank could not create or map memory; raised on every rank.
    """
    rings: dict[int, TapRing] = {}
    names: dict[str, str] = {}
    try:
        error = None
        try:
            for source, spec in specs.items() if seat.consumes else ():
                num_bytes = ring_bytes(spec, *sizes[source])
                names[str(source)], buffer = segments.create(num_bytes)
                rings[source] = TapRing(spec, *sizes[source], buffer, debug)
        except ChannelError as failure:
            error = failure
        offers = _gather_or_raise(control, error, {"lane": seat.lane, "names": names}, timeout_s)
        try:
            for source in seat.stages if not seat.consumes else ():
                if source in specs:
                    num_bytes = ring_bytes(specs[source], *sizes[source])
                    buffer = segments.attach(_offered(offers, seat, source), num_bytes)
                    rings[source] = TapRing(specs[source], *sizes[source], buffer, debug)
        except ChannelError as failure:
            error = failure
        _gather_or_raise(control, error, {}, timeout_s)
    finally:
        for name in names.values():
            segments.unlink(name)
    return rings


def _offered(offers: Sequence[Any], seat: Seat, source: int) -> str:
    key = str(source)
    found = [o["names"][key] for o in offers if o["lane"] == seat.lane and key in o["names"]]
    if len(found) != 1:
        raise ChannelError(
            f"tap channel {source}->{seat.last} ({seat.lane}): expected one stage {seat.last} "
            f"in this lane, found {len(found)}"
        )
    return str(found[0])


def _gather_or_raise(
    control: Control, error: ChannelError | None, payload: dict[str, Any], timeout_s: float
) -> list[Any]:
    """Gather; when a rank failed, raise on every rank, so that nobody waits for it."""
    text = None if error is None else str(error)
    answers = control.all_gather({**payload, "error": text}, deadline_s=timeout_s)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise ChannelError(f"rank {rank} could not map tap memory: {answer['error']}")
    return answers

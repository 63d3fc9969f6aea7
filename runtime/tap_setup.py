"""How the ends of tap channels find each other: agreement on the list, transports, then rings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_compile.errors import ChannelError

from .fabric import Control
from .tap_choice import Hello, choose, own_hello
from .tap_slot import TapSpec, specs_digest
from .tap_transport import RingLayout, Setting, TapEdge, TapReader, TapTransport, TapWriter
from .tap_transports import open_transport

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of all channels once they have met."""

    edges: dict[int, TapEdge]
    """This rank's pipeline's, by source stage."""
    transports: dict[str, str]
    """Transport by edge, such as ``{"dp0 cp0 0->2": "shm"}``, of every pipeline."""
    pipelines: tuple[tuple[int, ...], ...]
    """Global ranks of every pipeline."""

    def transport_of(self, edge: TapEdge) -> str:
        """Name of the transport of an edge."""
        return self.transports[edge.name]


def agree_on_channels(
    control: Control,
    specs: Sequence[TapSpec],
    seat: Seat,
    transport: str,
    device: torch.device,
    timeout_s: float,
) -> Agreed:
    """Check that all ranks have the same channels, and choose a transport for every edge.

    Raises:
        ChannelError: Ranks disagree on the list of channels, or a lane lacks a stage.
    """
    hello = own_hello(seat.lane, seat.stages, specs_digest(specs), device)
    replies = control.all_gather(hello.to_json(), deadline_s=timeout_s)
    hellos = [Hello.from_json(reply) for reply in replies]
    for rank, other in enumerate(hellos):
        if other.specs != hello.specs:
            raise ChannelError(
                f"rank {rank} (stages {list(other.stages)}) has other tap channels than rank "
                f"{control.rank} (stages {list(seat.stages)}); every rank must lower the same plan"
            )
    lanes = sorted({other.lane for other in hellos})
    edges: dict[int, TapEdge] = {}
    transports: dict[str, str] = {}
    for lane in lanes:
        ranks = {s: r for r, o in enumerate(hellos) if o.lane == lane for s in o.stages}
        for spec in specs:
            edge = _edge(spec.source, seat.last, lane, ranks)
            transports[edge.name] = choose(hellos[edge.writer], hellos[edge.reader], transport)
            if lane == seat.lane:
                edges[spec.source] = edge
    pipelines = tuple(tuple(r for r, o in enumerate(hellos) if o.lane == lane) for lane in lanes)
    return Agreed(edges, transports, pipelines)


def _edge(source: int, last: int, lane: str, ranks: Mapping[int, int]) -> TapEdge:
    missing = [stage for stage in (source, last) if stage not in ranks]
    if missing:
        raise ChannelError(
            f"tap channel {source}->{last} ({lane}): expected one rank with stage {missing[0]} in this "
            f"lane, found stages {sorted(ranks)}"
        )
    return TapEdge(source, last, lane, ranks[source], ranks[last])


def open_transports(setting: Setting, agreed: Agreed) -> dict[str, TapTransport]:
    """Open every transport that any edge of the world uses, in one order on all ranks."""
    return {name: open_transport(name, setting) for name in sorted(set(agreed.transports.values()))}


@dataclass
class Rings:
    """This rank's ends, by source stage."""

    writers: dict[int, TapWriter]
    readers: dict[int, TapReader]

    def close(self) -> None:
        """Free all ends."""
        for writer in self.writers.values():
            writer.close()
        for reader in self.readers.values():
            reader.close()


def map_rings(
    control: Control,
    transports: Mapping[str, TapTransport],
    agreed: Agreed,
    layouts: Mapping[int, RingLayout],
    timeout_s: float,
) -> Rings:
    """Allocate rings at the last stage and map them at their sources; all ranks take part.

    Names are gone again when this returns or raises, so that a kill later on leaves nothing.

    Args:
        control: Carries handles and answers.
        transports: By name.
        agreed: All edges.
        layouts: Size of each ring, by source stage.
        timeout_s: Deadline of each exchange, in seconds.

    Raises:
        ChannelError: Some rank could not create or map memory; raised on every rank.
    """
    rings = Rings({}, {})
    me = control.rank
    mine = [(edge, transports[agreed.transport_of(edge)]) for edge in agreed.edges.values()]

    def offer(known: Mapping[str, Any]) -> dict[str, Any]:
        handles = {}
        for edge, transport in mine:
            if edge.reader == me:
                reader, handles[edge.name] = transport.offer(edge, layouts[edge.source])
                rings.readers[edge.source] = reader
        return handles

    def accept(handles: Mapping[str, Any]) -> dict[str, Any]:
        answers = {}
        for edge, transport in mine:
            if edge.writer == me:
                writer, answers[edge.name] = transport.accept(
                    edge, layouts[edge.source], handles[edge.name]
                )
                rings.writers[edge.source] = writer
        return answers

    def settle(answers: Mapping[str, Any]) -> dict[str, Any]:
        for edge, transport in mine:
            if edge.reader == me:
                transport.settle(edge, answers[edge.name])
        return {}

    told: dict[str, Any] = {}
    try:
        for act in (offer, accept, settle):
            told = _act(control, act, told, timeout_s)
    except BaseException:
        rings.close()
        raise
    finally:
        for transport in transports.values():
            transport.withdraw()
    return rings


def _act(control: Control, act: Any, known: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Do one part of the set-up and gather what it tells; when a rank failed, raise on every rank."""
    error: ChannelError | None = None
    told: dict[str, Any] = {}
    try:
        told = act(known)
    except ChannelError as failure:
        error = failure
    text = None if error is None else str(error)
    answers = control.all_gather({"told": told, "error": text}, deadline_s=timeout_s)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise ChannelError(f"rank {rank} could not map tap memory: {answer['error']}")
    return {name: value for answer in answers for name, value in answer["told"].items()}

"""All ranks at once, one process each (torchrun): the exchange is real and part of the time."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from spec_compile.plan import Plan
from spec_compile.runtime.attention.backends import backend_for
from spec_compile.runtime.collectives import PairwiseFabric
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.fabric import Fabric
from spec_compile.runtime.fabrics import build_chosen
from spec_compile.runtime.kernel_cost import kernel_cost
from spec_compile.runtime.layout import plan_layout
from spec_compile.runtime.processes import join, open_world
from spec_compile.runtime.solo import SoloControl
from spec_compile.runtime.world import group_ranks

from .attention import predicted_ms
from .eagle3 import Eagle3Rank, UspRank, needed_bytes, pool_bytes
from .peers.usp import FabricGroup
from .replay import ReplayFabric
from .report import Ideal, Row
from .rows import Settings, row_of
from .shards import causal_pairs, flops_of
from .timing import Timing
from .work import Measured, Work, measure_work

WAIT_S = 600.0
LATE_S = 120.0
"""A measurement that takes longer shows where every thread is."""
STANDARD_ERROR = 2


class Processes:
    """The ranks of a launch, as one cp group.

    Args:
        settings: of the run.
        num_ranks: processes of the launch.
    """

    def __init__(self, settings: Settings, num_ranks: int) -> None:
        self._settings, self._link_gb_s = replace(settings, link_gb_s=0.0), settings.link_gb_s
        self.control: SoloControl | SocketControl = join(num_ranks, timeout_s=WAIT_S)
        self.size = self.control.size
        self._fabrics: dict[tuple[int, int, str], dict[str, PairwiseFabric]] = {}

    def measure_passes(
        self, case: str, lengths: Sequence[int], *, strategy: str, backend: str = "auto",
        passes: int = 1, ideal: Ideal | None = None, fabrics: Sequence[str] = ("auto",),
    ) -> Iterator[Row]:  # fmt: skip
        """`attention.measure_passes` with every rank alone, then with all ranks at once by each fabric.

        Rows come as they are measured, the same on every rank. ``fabrics`` names what carries the
        exchange: "auto" as a step chooses, "cuda_ipc", "nccl" or "gloo".
        """
        shape, device, cp = self._settings.shape, self._settings.device, self.size
        name = backend_for(device, shape.dtype, shape.dim, shape.dim, backend)
        layout = plan_layout(lengths, cp, by_keys=strategy == "pass_q", kernels=kernel_cost({name}))
        gathered = len(layout.slots) if strategy == "all_gather" else 0
        needed = needed_bytes(shape, layout.rows_per_rank, gathered, passes)
        replay = ReplayFabric("cp", self.control.rank, cp, device)

        def row(fabric: Fabric, what: str, measured: list[Measured]) -> Row:
            found = self._row(
                case, what, name, measured, needed, passes * causal_pairs(lengths), ideal
            )
            expected = predicted_ms(
                self._settings, layout, lengths, strategy, passes, exchange=fabric is not replay
            )
            return replace(found, predicted_ms=expected)

        def make(fabric: Fabric) -> Callable[[], Work]:
            return lambda: Eagle3Rank(
                shape, layout, lengths, fabric, device, strategy=strategy, backend=backend, passes=passes
            )  # fmt: skip

        alone = row(replay, f"{strategy}, each rank alone", self._in_turn(make(replay)))
        yield replace(alone, link_gb_s=self._link_gb_s)
        for kind in fabrics:
            real = self._fabric(cp, 1, kind)["cp"]
            found = row(real, f"{strategy}, {fabric_name(real)}", self._together(make(real)))
            yield replace(found, sent=alone.sent)

    def measure_usp(
        self, case: str, total: int, split: tuple[int, int], *, backend: str, passes: int,
        ideal: Ideal | None = None,
    ) -> Row:  # fmt: skip
        """`attention.measure_usp` with all ranks at once."""
        # ranks of a Ulysses group are neighbours, those of a ring are strided: as cp and pp groups are
        fabrics = self._fabric(*split)
        groups = (FabricGroup(fabrics["cp"]), FabricGroup(fabrics["pp"]))
        shape, device = self._settings.shape, self._settings.device

        def make() -> Work:
            return UspRank(shape, total, *groups, device, backend=backend, passes=passes)

        rows = -(-total // self.size)
        needed = needed_bytes(shape, rows, 0, passes)
        what = f"USP, ulysses {split[0]} x ring {split[1]}"
        pairs = passes * causal_pairs([total])
        return self._row(case, what, backend, self._together(make), needed, pairs, ideal)

    def measure_peer(
        self, name: str, case: str, total: int, make: Callable[[], Work], ideal: Ideal | None
    ) -> Row:
        """Causal attention of another package, all ranks at once."""
        return self._row(
            case, name, "its own", self._together(make), 0, causal_pairs([total]), ideal
        )

    def close(self) -> None:
        """Leave."""
        for fabrics in self._fabrics.values():
            for fabric in fabrics.values():
                fabric.close()
        self.control.close()

    def agree(self, seconds: float) -> float:
        """Largest of all ranks' numbers."""
        return float(max(self.control.all_gather(seconds, deadline_s=WAIT_S)))

    def _together(self, make: Callable[[], Work]) -> list[Measured]:
        """Every rank's figures of one run, on every rank."""
        with stacks_when_late():
            return self._everyone(
                measure_work(
                    make, self._settings.device, self._settings.repeats,
                    budget_s=self._settings.budget_s, agree=self.agree,
                )
            )  # fmt: skip

    def _in_turn(self, make: Callable[[], Work]) -> list[Measured]:
        """Likewise without exchange: at once on GPUs of their own, else one rank after the other."""
        settings, measured = self._settings, None
        shared = settings.device.type != "cuda" or torch.cuda.device_count() < self.size
        for turn in range(self.size if shared else 1):
            if not shared or turn == self.control.rank:
                with stacks_when_late():
                    measured = measure_work(
                        make, settings.device, settings.repeats, budget_s=settings.budget_s,
                        uncounted_bytes=pool_bytes,
                    )  # fmt: skip
            self.agree(0.0)
        assert measured is not None, "every rank has a turn"
        return self._everyone(measured)

    def _everyone(self, measured: Measured) -> list[Measured]:
        replies = self.control.all_gather(_write(measured), deadline_s=WAIT_S)
        return [_read(reply) for reply in replies]

    def _row(
        self, case: str, what: str, kernel: str, measured: list[Measured], needed: int, pairs: int,
        ideal: Ideal | None,
    ) -> Row:  # fmt: skip
        flops, ranks = flops_of(self._settings.shape, pairs), range(self.size)
        return row_of(
            self._settings, case, what, kernel, self.size, ranks, measured, flops, ideal, needed, None
        )  # fmt: skip

    def _fabric(self, cp: int, pp: int, kind: str = "auto") -> dict[str, PairwiseFabric]:
        if (cp, pp, kind) not in self._fabrics:
            with stacks_when_late():
                self._fabrics[cp, pp, kind] = self._build(cp, pp, kind)
        return self._fabrics[cp, pp, kind]

    def _build(self, cp: int, pp: int, kind: str) -> dict[str, PairwiseFabric]:
        plan, device = Plan(cp=cp, pp=pp, timeout_s=WAIT_S), self._settings.device
        if kind == "auto" or not isinstance(self.control, SocketControl):
            return dict(open_world(self.control, plan, device).fabrics)
        groups = group_ranks(plan).items()
        chosen = {name: kind for name, ranks in groups if len(ranks[0]) > 1}
        return build_chosen(self.control, plan, device, chosen)


@contextlib.contextmanager
def stacks_when_late() -> Iterator[None]:
    """Write every thread's Python stack to standard error when what is inside takes over `LATE_S`.

    Nothing is ended; it is shown once.
    """
    faulthandler.dump_traceback_later(LATE_S, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def fabric_name(fabric: PairwiseFabric) -> str:
    """Short name of what carries the exchange."""
    return type(fabric).__name__.removesuffix("Fabric").lower()


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of a process: GPUs are dealt round, several processes may share one."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _write(measured: Measured) -> dict[str, Any]:
    times = (measured.forward, measured.backward, measured.total)
    return {
        "times": [[t.median, t.low, t.high] for t in times],
        "sent": [measured.sent_forward, measured.sent_backward],
        "peaks": [measured.forward_peak_bytes, measured.peak_bytes],
    }


def _read(fields: dict[str, Any]) -> Measured:
    forward, backward, total = (Timing(*values) for values in fields["times"])
    sent_forward, sent_backward = fields["sent"]
    return Measured(forward, backward, total, sent_forward, sent_backward, *fields["peaks"])

"""All ranks at once, one process each (torchrun): the exchange is real and part of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spec_compile.plan import Plan
from spec_compile.runtime.attention.backends import backend_for
from spec_compile.runtime.collectives import PairwiseFabric
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.layout import plan_layout
from spec_compile.runtime.processes import build_fabrics, join
from spec_compile.runtime.solo import SoloControl

from .attention import predicted_ms
from .eagle3 import Eagle3Rank, UspRank, needed_bytes
from .peers.usp import FabricGroup
from .report import Ideal, Row
from .rows import Settings, row_of
from .shards import causal_pairs, flops_of
from .timing import Timing
from .work import Measured, Work, measure_work

WAIT_S = 600.0


class Processes:
    """The ranks of a launch, as one cp group.

    Args:
        settings: of the run.
        num_ranks: processes of the launch.
    """

    def __init__(self, settings: Settings, num_ranks: int) -> None:
        self._settings = replace(settings, link_gb_s=0.0)
        self.control: SoloControl | SocketControl = join(num_ranks, timeout_s=WAIT_S)
        self.size = self.control.size
        self._fabrics: dict[tuple[int, int], dict[str, PairwiseFabric]] = {}

    def measure_passes(
        self, case: str, lengths: Sequence[int], *, strategy: str, backend: str = "auto",
        passes: int = 1, ideal: Ideal | None = None, one_device: Row | None = None,
    ) -> Row:  # fmt: skip
        """`attention.measure_passes` with all ranks at once; the same on every rank."""
        shape, device, cp = self._settings.shape, self._settings.device, self.size
        layout = plan_layout(lengths, cp)
        fabric = self._fabric(cp, 1)["cp"]

        def make() -> Work:
            return Eagle3Rank(
                shape, layout, lengths, fabric, device, strategy=strategy, backend=backend, passes=passes
            )  # fmt: skip

        row = self._row(
            case, f"{strategy}, {fabric_name(fabric)}", backend, make, needed_bytes(
                shape, layout.rows_per_rank, len(layout.slots), passes
            ), passes * causal_pairs(lengths), ideal, one_device,
        )  # fmt: skip
        expected = predicted_ms(self._settings, layout, lengths, strategy, passes, exchange=True)
        return replace(row, predicted_ms=expected)

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
        needed = needed_bytes(shape, rows, rows * self.size, passes)
        what = f"USP, ulysses {split[0]} x ring {split[1]}"
        return self._row(
            case, what, backend, make, needed, passes * causal_pairs([total]), ideal, None
        )

    def measure_peer(
        self, name: str, case: str, total: int, make: Callable[[], Work], ideal: Ideal | None
    ) -> Row:
        """Causal attention of another package, all ranks at once."""
        return self._row(case, name, "", make, 0, causal_pairs([total]), ideal, None)

    def close(self) -> None:
        """Leave."""
        for fabrics in self._fabrics.values():
            for fabric in fabrics.values():
                fabric.close()
        self.control.close()

    def agree(self, seconds: float) -> float:
        """Largest of all ranks' numbers."""
        return float(max(self.control.all_gather(seconds, deadline_s=WAIT_S)))

    def measure(self, make: Callable[[], Work]) -> list[Measured]:
        """Every rank's figures, on every rank."""
        measured = measure_work(
            make, self._settings.device, self._settings.repeats, budget_s=self._settings.budget_s,
            agree=self.agree,
        )  # fmt: skip
        return [
            _read(text) for text in self.control.all_gather(_write(measured), deadline_s=WAIT_S)
        ]

    def _row(
        self, case: str, what: str, backend: str, make: Callable[[], Work], needed: int, pairs: int,
        ideal: Ideal | None, one_device: Row | None,
    ) -> Row:  # fmt: skip
        shape, device = self._settings.shape, self._settings.device
        measured = self.measure(make)
        name = backend
        if backend == "auto":
            name = backend_for(device, shape.dtype, shape.dim, shape.dim)
        return row_of(
            self._settings, case, what, name, self.size, range(self.size), measured,
            flops_of(shape, pairs), ideal, needed, one_device,
        )  # fmt: skip

    def _fabric(self, cp: int, pp: int) -> dict[str, PairwiseFabric]:
        if (cp, pp) not in self._fabrics:
            plan = Plan(cp=cp, pp=pp, timeout_s=WAIT_S)
            self._fabrics[cp, pp] = build_fabrics(self.control, plan, self._settings.device)
        return self._fabrics[cp, pp]


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
        "times": [[t.median, t.low, t.high, t.samples] for t in times],
        "peak_bytes": measured.peak_bytes,
    }


def _read(fields: dict[str, Any]) -> Measured:
    forward, backward, total = (Timing(*values) for values in fields["times"])
    return Measured(forward, backward, total, 0, 0, fields["peak_bytes"])

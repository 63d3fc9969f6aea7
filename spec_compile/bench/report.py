"""What a benchmark prints and writes: rows as they come, and where, when and with what they were measured."""

from __future__ import annotations

import dataclasses
import json
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .timing import Timing
from .work import Measured

GIB = 2**30
COLUMNS = (
    ("case", 19), ("what", 36), ("kernel", 11), ("cp", 3), ("forward ms", 25), ("backward ms", 25),
    ("TF/s f", 8), ("TF/s b", 8), ("ideal f", 8), ("ideal b", 8), ("effic.", 7), ("sent MB f", 10),
    ("sent MB b", 10), ("link ms", 8), ("model ms", 9), ("peak GiB", 9), ("/needed", 8), ("f alone", 8),
)  # fmt: skip
HEADER = "".join(
    f"{name:>{width}}" if i > 3 else f"{name:{width}}" for i, (name, width) in enumerate(COLUMNS)
)


@dataclasses.dataclass(frozen=True)
class Ideal:
    """Rates of one dense causal kernel, in TFLOP/s."""

    backend: str
    rows: int
    forward: float
    backward: float

    def __str__(self) -> str:
        return (
            f"ideal: {self.backend}, one causal block of {self.rows} rows: "
            f"{self.forward:.4g} TFLOP/s forward, {self.backward:.4g} backward"
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured case; times are of the slowest of the ranks that ran."""

    case: str
    what: str
    """The strategy, or the peer."""
    kernel: str
    cp: int
    ranks: tuple[int, ...]
    """Those that ran."""
    forward: Timing
    backward: Timing
    total: Timing
    """Forward and backward of one rank; the slowest rank's."""
    flops: tuple[int, int]
    """Useful ones over all ranks, forward and backward."""
    ideal: tuple[float, float] | None
    """TFLOP/s to compare with."""
    sent: tuple[int, int]
    """Bytes a rank sends, forward and backward."""
    link_gb_s: float
    """Assumed for the exchange, which these times do not hold; 0 where they do."""
    forward_peak_bytes: int | None
    """Of the forward alone, at whose end everything is saved."""
    peak_bytes: int | None
    needed_bytes: int
    """What must be saved; 0 where that is not counted."""
    efficiency: float | None = None
    """Time on one device over cp times this one."""
    predicted_ms: float | None = None
    """The cost model's, without exchange."""

    @property
    def rates(self) -> tuple[float, float]:
        """Useful TFLOP/s a device."""
        times = (self.forward, self.backward)
        first, second = (
            f / self.cp / t.median / 1e9 for f, t in zip(self.flops, times, strict=True)
        )
        return first, second

    @property
    def link_ms(self) -> float:
        """Of the exchange alone; 0 where it is part of the times."""
        return sum(self.sent) / self.link_gb_s / 1e6 if self.link_gb_s else 0.0

    @property
    def cells(self) -> list[str]:
        """Texts of the columns."""
        shares = [None, None]
        if self.ideal is not None:
            shares = [r / i for r, i in zip(self.rates, self.ideal, strict=True)]  # type: ignore[misc]
        peak, needed = self.peak_bytes, self.needed_bytes
        held = [
            "-" if x is None or not needed else f"{x / needed:.2f}x"
            for x in (peak, self.forward_peak_bytes)
        ]
        return [
            self.case, self.what, self.kernel, str(self.cp), str(self.forward), str(self.backward),
            *(f"{rate:.3g}" for rate in self.rates), *(_share(share) for share in shares),
            _share(self.efficiency), *(f"{sent / 1e6:.1f}" for sent in self.sent),
            f"{self.link_ms:.2f}" if self.link_gb_s else "in time",
            "-" if self.predicted_ms is None else f"{self.predicted_ms:.2f}",
            "-" if peak is None else f"{peak / GIB:.2f}",
            *held,
        ]  # fmt: skip

    def __str__(self) -> str:
        pairs = zip(self.cells, COLUMNS, strict=True)
        return "".join(
            f" {cell:>{width - 1}}" if i > 3 else f"{cell:{width}}"
            for i, (cell, (_, width)) in enumerate(pairs)
        )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def slowest(measured: Sequence[Measured]) -> tuple[Timing, Timing, Timing]:
    """Largest forward, backward and total over ranks."""
    pick = [
        [m.forward for m in measured],
        [m.backward for m in measured],
        [m.total for m in measured],
    ]
    forward, backward, total = (max(times, key=lambda t: t.median) for times in pick)
    return forward, backward, total


class Report:
    """Says every line at once, and keeps a JSON and a Markdown file up to date.

    Args:
        device: where things run.
        command: what was typed.
        write: shows a line.
        path: of the JSON file; None for none.
        markdown: of the Markdown file; None for none.
    """

    def __init__(
        self, device: torch.device, command: Sequence[str], write: Callable[[str], None],
        path: Path | None = None, markdown: Path | None = None,
    ) -> None:  # fmt: skip
        self._write, self._path, self._markdown = write, path, markdown
        self._rows: list[Row] = []
        self._content: dict[str, Any] = {
            "command": shlex.join(["spec-compile", *command]),
            "versions": versions(device),
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "lines": [],
            "rows": [],
        }
        self._start = time.monotonic()
        self.say("$ " + self._content["command"])
        self.say("; ".join(f"{name} {value}" for name, value in self._content["versions"].items()))

    def say(self, text: str) -> None:
        """Print a line, or several."""
        self._content["lines"] += text.splitlines()
        self._content["seconds"] = round(time.monotonic() - self._start, 1)
        self._write(text)
        if self._path is not None:
            self._path.write_text(json.dumps(self._content, indent=1), encoding="utf-8")
        if self._markdown is not None:
            self._markdown.write_text(
                as_markdown(self._rows, self._content["lines"]), encoding="utf-8"
            )

    def add(self, row: Any) -> None:
        """Print a row that is a dataclass, and keep its fields."""
        self._content["rows"].append({"kind": type(row).__name__, **dataclasses.asdict(row)})
        if isinstance(row, Row):
            self._rows.append(row)
        self.say(str(row))


def as_markdown(rows: Sequence[Row], printed: Sequence[str]) -> str:
    """A table of the columns that say something, and every other line that was printed below it."""
    in_table = {HEADER, *map(str, rows)}
    notes = [line for line in printed if line not in in_table]
    table = [[name for name, _ in COLUMNS], *(row.cells for row in rows)]
    kept = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in table[1:])]
    lines = ["| " + " | ".join(line[i] for i in kept) + " |" for line in table if kept]
    if lines:
        lines[1:1] = ["|" + "---|" * len(kept)]
    return "\n".join([*lines, "", "```", *notes, "```", ""])


def versions(device: torch.device) -> dict[str, str]:
    """What a figure depends on."""
    found = {"device": device.type, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    try:
        import triton
    except ImportError:
        return found
    return {**found, "triton": triton.__version__}

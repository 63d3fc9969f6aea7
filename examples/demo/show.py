"""What the demo prints: progress, bars, a table of seconds, and a few lines of the graph."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

BAR = 24
HEARTBEAT_S = 5.0
EXCERPT = ("branch_attention", "context_attention", "soft_cross_entropy", "tap_send", "tap_recv")
WIDTH = 150


class Clock:
    """Seconds by phase; says so while a phase takes long."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str, *, beat: bool = True) -> Iterator[None]:
        """Count the seconds of a block; ``beat`` prints a line every few of them."""
        start = time.perf_counter()
        over = threading.Event()
        if beat:
            threading.Thread(target=self._beat, args=(name, over), daemon=True).start()
        try:
            yield
        finally:
            over.set()
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def _beat(self, name: str, over: threading.Event) -> None:
        start = time.perf_counter()
        while not over.wait(HEARTBEAT_S):
            say(f"... {name}, {time.perf_counter() - start:.0f} s")


def say(line: str = "") -> None:
    """Print a line now."""
    print(line, flush=True)


def heading(text: str) -> None:
    """Print a line that starts a part."""
    say(f"\n== {text}")


def bar(share: float) -> str:
    """Draw a share of 0..1."""
    filled = round(BAR * min(max(share, 0.0), 1.0))
    return "#" * filled + "." * (BAR - filled)


def seconds_table(seconds: dict[str, float]) -> list[str]:
    """Draw the seconds of each phase."""
    total = sum(seconds.values()) or 1.0
    width = max(len(name) for name in seconds)
    return [
        f"  {name:<{width}} {spent:7.1f} s  {bar(spent / total)}" for name, spent in seconds.items()
    ]


def graph_excerpt(before: str, after: str) -> list[str]:
    """Show the attention of one target layer and of the draft's last step, before and after."""
    whole = _excerpt(before.splitlines())
    stages = [text.splitlines() for text in after.split("\n\n")]
    lines = ["before (one graph, no ranks):", *_ends(whole), "after:"]
    for stage in stages:
        lines += [f"  {stage[0]}", *_ends(_excerpt(stage))]
    return lines


def _excerpt(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if any(f"spec_compile.{name}." in line for name in EXCERPT)]


def _ends(lines: Sequence[str]) -> list[str]:
    """Keep the first line and the last three; cut what is too long to read."""
    kept = list(lines) if len(lines) <= 5 else [lines[0], f"... {len(lines) - 4} more", *lines[-3:]]
    return [f"  {line[: WIDTH - 3] + '...' if len(line) > WIDTH else line}" for line in kept]

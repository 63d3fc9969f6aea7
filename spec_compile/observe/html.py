"""One self-contained page: the explanation, the stage graphs, and what every pass changed."""

from __future__ import annotations

import difflib
import html
from collections.abc import Sequence
from typing import Protocol

DIFFED_LINES = 4000
"""Longer graphs are shown whole after each pass: a diff would take minutes."""
STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#1b1f24}
pre{font:12px/1.45 ui-monospace,monospace;background:#f6f8fa;padding:.8rem;overflow-x:auto;border-radius:6px}
details{margin:.5rem 0;border:1px solid #d0d7de;border-radius:6px;padding:.4rem .8rem}
summary{cursor:pointer;font-weight:600} table{border-collapse:collapse} td,th{padding:.2rem .8rem;text-align:left;
border-bottom:1px solid #d0d7de} .add{color:#116329;background:#dafbe1} .del{color:#82071e;background:#ffebe9}
"""


class Record(Protocol):
    """What the page shows of a pass."""

    @property
    def name(self) -> str:
        """Class of the pass."""

    @property
    def seconds(self) -> float:
        """Time it took."""

    @property
    def changes(self) -> int:
        """Places it changed."""

    @property
    def before(self) -> str:
        """Text of the graph before."""

    @property
    def after(self) -> str:
        """Text of the graph after."""


def page(title: str, explanation: str, records: Sequence[Record], graphs: dict[str, str]) -> str:
    """Return the page as text; no scripts, no outside files."""
    rows = "".join(
        f"<tr><td>{i:02d}</td><td>{html.escape(r.name)}</td><td>{r.changes}</td><td>{r.seconds * 1e3:.0f} ms</td>"
        f"<td>{len(r.before.splitlines())} -> {len(r.after.splitlines())}</td></tr>"
        for i, r in enumerate(records)
    )
    passes = "".join(
        f"<details><summary>{i:02d} {html.escape(r.name)}</summary>{_diff(r)}</details>"
        for i, r in enumerate(records)
    )
    stages = "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in graphs.items()
    )
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(explanation)}</pre><h2>Passes</h2>"
        f"<table><tr><th></th><th>pass</th><th>changes</th><th>time</th><th>nodes</th></tr>{rows}</table>{passes}"
        f"<h2>Stage graphs</h2>{stages}\n"
    )


def _diff(record: Record) -> str:
    if record.before == record.after:
        return "<p>no change in the text of the graph</p>"
    # node numbers shift with every insertion: compare the lines without them
    before, after = (text.splitlines() for text in (record.before, record.after))
    strip = [[_unnumbered(line) for line in lines] for lines in (before, after)]
    parts = []
    if len(before) > DIFFED_LINES:
        return f"<pre>{html.escape(record.after)}</pre>"
    matcher = difflib.SequenceMatcher(None, strip[0], strip[1], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        parts += [f"<span class=del>- {html.escape(line)}</span>" for line in before[a:b]]
        parts += [f"<span class=add>+ {html.escape(line)}</span>" for line in after[c:d]]
    return f"<pre>{chr(10).join(parts)}</pre>"


def _unnumbered(line: str) -> str:
    return " ".join(
        "%" if word.lstrip("(").startswith("%") else word
        for word in line.replace(":", " : ").split()
    )

"""Draw the spans of all ranks as one SVG file: a band a rank, time from left to right."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence

from .timeline import KINDS, Span

COLORS = {
    "forward": "#4c9be8",
    "backward": "#2f6db3",
    "weights": "#1f4a7a",
    "draft": "#8e6bbf",
    "send": "#f0b429",
    "receive": "#f7d774",
    "push": "#2e9e5b",
    "credit": "#e4572e",
    "stamp": "#f19a86",
}
WORDS = {
    "weights": "gradients of weights",
    "draft": "draft, both ways",
    "send": "send to the next stage",
    "receive": "wait for another stage",
    "push": "push of taps",
    "credit": "wait for a free slot",
    "stamp": "wait for taps",
}
WIDTH, LEFT, RIGHT, BAND, GAP, TOP = 1200, 150, 50, 46, 26, 80
INNER = ("send", "receive", "push", "credit", "stamp", "draft")
"""Drawn over the lower part of a band, so that what they interrupt stays visible."""


def picture(title: str, ranks: Sequence[Sequence[Span]], names: Sequence[str]) -> str:
    """Return an SVG; no scripts, no outside files.

    Args:
        title: Above everything.
        ranks: Spans of every rank, outer ones first, in seconds since a moment that all share.
        names: What to call each rank.
    """
    first = min((s.start for spans in ranks for s in spans), default=0.0)
    last = max((s.end for spans in ranks for s in spans), default=first + 1e-9)
    scale = (WIDTH - LEFT - RIGHT) / max(last - first, 1e-9)
    height = TOP + len(ranks) * (BAND + GAP) + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="22" font-size="16">{html.escape(title)}</text>',
        *_legend(),
    ]
    for row, (spans, name) in enumerate(zip(ranks, names, strict=True)):
        y = TOP + row * (BAND + GAP)
        parts.append(f'<text x="10" y="{y + 20}">{html.escape(name)}</text>')
        parts.append(f'<text x="10" y="{y + BAND + 14}" fill="#57606a">{_shares(spans)}</text>')
        parts += [_box(s, LEFT + (s.start - first) * scale, scale, y) for s in spans]
    parts += _axis(last - first, scale, height - 40)
    return "\n".join([*parts, "</svg>\n"])


def _box(span: Span, x: float, scale: float, y: int) -> str:
    inner = span.kind in INNER
    top, tall = (y + BAND * 0.55, BAND * 0.45) if inner else (y, BAND)
    width = max((span.end - span.start) * scale, 0.6)
    text = (
        f"{WORDS.get(span.kind, span.kind)}, stage {span.stage}, micro-batch {span.micro_batch}: "
        f"{(span.end - span.start) * 1e3:.2f} ms"
    )
    label = ""
    if not inner and width > 34:
        label = (
            f'<text x="{x + 3:.1f}" y="{y + 14}" fill="white">'
            f"{span.stage}{span.kind[0].upper()}{span.micro_batch}</text>"
        )
    return (
        f'<rect x="{x:.2f}" y="{top:.1f}" width="{width:.2f}" height="{tall:.1f}" fill="{COLORS[span.kind]}" '
        f'stroke="white" stroke-width="0.4"><title>{html.escape(text)}</title></rect>{label}'
    )


def seconds_by_kind(spans: Sequence[Span]) -> dict[str, float]:
    """Time of each kind, without what is nested inside it."""
    totals: defaultdict[str, float] = defaultdict(float)
    open_spans: list[Span] = []
    for span in spans:
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        if open_spans:
            totals[open_spans[-1].kind] -= span.end - span.start
        totals[span.kind] += span.end - span.start
        open_spans.append(span)
    return dict(totals)


def _shares(spans: Sequence[Span]) -> str:
    totals = seconds_by_kind(spans)
    whole = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    shown = [
        f"{WORDS.get(kind, kind)} {totals[kind] / max(whole, 1e-9):.1%}"
        for kind in KINDS
        if kind in totals
    ]
    return html.escape(", ".join(shown))


def _legend() -> list[str]:
    parts, x, y = [], LEFT, 32
    for kind in KINDS:
        text = WORDS.get(kind, kind)
        width = 30 + 7 * len(text)
        if x + width > WIDTH:
            x, y = LEFT, y + 20
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[kind]}"/>'
            f'<text x="{x + 16}" y="{y + 11}">{html.escape(text)}</text>'
        )
        x += width
    return parts


def _axis(seconds: float, scale: float, y: int) -> list[str]:
    parts = [f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#57606a"/>']
    for i in range(11):
        x = LEFT + seconds * scale * i / 10
        parts.append(
            f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#57606a"/>'
            f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{seconds * i * 100:.1f} ms</text>'
        )
    return parts

"""Charts as SVG, drawn here: no script, no style, and every text in them is escaped.

What a chart says with colour and shape stands in its title too; looks are the style sheet's, by the class of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from markupsafe import Markup

STEP, TALL = 8, 16
LINE, WIDE, HIGH = 22, 640, 80
SHAPES = {
    "succeeded": "M1 0h6v16h-6z",
    "skipped": "M1 13h6v3h-6z",
    "missed": "M2 1h4v14h-4z",
    "coalesced": "M1 8h6v8h-6z",
}
"""How a tick of a state looks; whatever runs or waits is a wedge, and whatever went wrong a cross."""
OPEN, CROSS = "M1 0l6 8l-6 8z", "M1 2l6 12M7 2l-6 12"
SVG = Markup(
    '<svg class="{}" role="{}" aria-label="{}" width="{}" height="{}" viewBox="0 0 {} {}"><title>{}</title>{}</svg>'
)
LINK = Markup('<a href="{}" tabindex="-1" aria-label="{}" transform="translate({:.1f} 0)"><title>{}</title>{}</a>')
PLAIN = Markup('<g transform="translate({:.1f} 0)"><title>{}</title>{}</g>')
COLUMN = Markup('<rect class="{}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')
SPAN = Markup('<g><title>{}: {}</title><rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/></g>')
LABEL = Markup('<text x="4" y="{}">{}</text>')


class Tick(NamedTuple):
    """A tick in a strip: its *state*, the address of its story, and what it is in words."""

    state: str
    address: str
    words: str


def sparkline(points: Sequence[float | None], width: int, height: int, title: str) -> Markup:
    """Draw how a number went, from left to right; where it was not known the line is broken."""
    most = max((one for one in points if one is not None), default=0) or 1
    step = width / max(1, len(points) - 1)
    path, pen = "", "M"
    for place, one in enumerate(points):
        if one is not None:
            path += f"{pen}{place * step:.1f} {1 + (height - 2) * (1 - one / most):.1f}{'h0' if pen == 'M' else ''}"
        pen = "M" if one is None else "L"
    return _svg("sparkline", width, height, title, [Markup('<path d="{}" fill="none"/>').format(path or "M0 0")])


def strip(ticks: Sequence[Tick], title: str = "Last ticks, the newest at the right") -> Markup:
    """Draw ticks beside one another, each a link; the keyboard passes them over, as a table has the same."""
    drawn = (
        _linked(one.address, one.words, Markup('<path class="{}" d="{}"/>').format(one.state, _shape(one.state)), x)
        for x, one in zip(range(0, STEP * len(ticks), STEP), ticks, strict=True)
    )
    return _svg("strip", STEP * max(1, len(ticks)), TALL, title, drawn, role="group")


def _shape(state: str) -> str:
    return SHAPES.get(state, OPEN if state in {"claimed", "enqueued", "started"} else CROSS)


def columns(
    values: Sequence[float], title: str, labels: Sequence[str], links: Sequence[str] = (), states: Sequence[str] = ()
) -> Markup:
    """Draw a column for each value, which its label tells in words, and which leads to its link if it has one."""
    most, step = max(values, default=0) or 1, max(2.0, min(24.0, WIDE / max(1, len(values))))
    drawn = []
    for place, (value, label) in enumerate(zip(values, labels, strict=True)):
        tall = max(1.0, HIGH * value / most)
        shape = COLUMN.format(states[place] if states else "", HIGH - tall, step - 1, tall)
        drawn.append(_linked(links[place] if links else "", label, shape, place * step))
    return _svg("columns", round(step * max(1, len(values))), HIGH, title, drawn, role="group" if links else "img")


def spans(rows: Sequence[tuple[str, datetime, datetime | None, str]], title: str) -> Markup:
    """Draw what lasted from when to when, a row each: label, begin, end, state; without an end it lasts yet."""
    begin = min((row[1] for row in rows), default=None)
    end = max((row[2] or row[1] for row in rows), default=None)
    whole, drawn = max(end - begin, timedelta(milliseconds=1)) if begin and end else timedelta(1), []
    for y, (label, began, ended, state) in zip(range(0, LINE * len(rows), LINE), rows, strict=True):
        x, wide = WIDE * ((began - (begin or began)) / whole), WIDE * (((ended or end or began) - began) / whole)
        drawn.append(
            SPAN.format(
                label, state, state if ended else f"{state} open", min(x, WIDE - 2), y + 2, max(2.0, wide), LINE - 4
            )
            + LABEL.format(y + 15, label)
        )
    return _svg("spans", WIDE, LINE * max(1, len(rows)), title, drawn)


def _linked(address: str, words: str, shape: Markup, x: float) -> Markup:
    return LINK.format(address, words, x, words, shape) if address else PLAIN.format(x, words, shape)


def _svg(kind: str, width: int, height: int, title: str, drawn: Iterable[Markup], *, role: str = "img") -> Markup:
    return SVG.format(kind, role, title, width, height, width, height, title, Markup("").join(drawn))

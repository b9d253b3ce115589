"""Geometry of charts; `templates/charts.html` draws them as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

CHART_WIDTH = 640


def draw_line(points: Sequence[float | None], width: int, height: int) -> str:
    """Return the SVG path of a series, with gaps for unknown values."""
    most = max((one for one in points if one is not None), default=0) or 1
    step = width / max(1, len(points) - 1)
    path, pen = "", "M"
    for place, one in enumerate(points):
        if one is not None:
            path += f"{pen}{place * step:.1f} {1 + (height - 2) * (1 - one / most):.1f}{'h0' if pen == 'M' else ''}"
        pen = "M" if one is None else "L"
    return path or "M0 0"


def place_spans(rows: Sequence[tuple[str, str, datetime, datetime | None]]) -> list[tuple[str, str, float, float]]:
    """Return name, state, left edge and width of each span; one without end is still open."""
    if not rows:
        return []
    first = min(began for _, _, began, _ in rows)
    last = max(ended or began for _, _, began, ended in rows)
    whole, placed = max(last - first, timedelta(milliseconds=1)), []
    for name, state, began, ended in rows:
        left, wide = CHART_WIDTH * ((began - first) / whole), CHART_WIDTH * (((ended or last) - began) / whole)
        placed.append((name, state, min(left, CHART_WIDTH - 2), max(2, wide)))
    return placed

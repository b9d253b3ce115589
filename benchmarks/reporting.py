"""Format results of a benchmark as facts for JSON, and as lines of eighty columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.contest import Benchmark, Figures, Peer

WIDTH, BESIDE = 80, 37

Facts = dict[str, Any]


def facts(benchmark: Benchmark, figures: Figures) -> Facts:
    """Return the results of the rounds, ours and each peer's."""
    found: Facts = {
        "about": benchmark.about,
        "unit": benchmark.unit,
        "less": benchmark.less,
        "ours": figures.ours,
        "peers": {peer.name: _of_peer(benchmark, peer, figures) for peer in benchmark.peers},
    }
    if benchmark.curve is not None:
        curve = benchmark.curve
        found["curve"] = {"picture": curve.picture, "line": curve.line, "points": [list(one) for one in curve.points]}
    return found


def _of_peer(benchmark: Benchmark, peer: Peer, figures: Figures) -> Facts:
    if why := figures.missing.get(peer.name):
        return {"missing": why, "target": peer.target}
    ratio = figures.ratio(peer.name)
    return {
        "figures": figures.peers[peer.name],
        "ratios": figures.ratios(peer.name),
        "ratio": ratio,
        "target": peer.target,
        "met": ratio <= peer.target if benchmark.less else ratio >= peer.target,
    }


def lines(name: str, found: Facts) -> Iterator[str]:
    """Yield a line for the benchmark and one for each peer, at most eighty columns wide."""
    if problem := found.get("failed") or found.get("missing"):
        yield from _wrapped(f"{name}  {'FAILED' if 'failed' in found else 'missing'}: {problem}", "  ")
        return
    yield from _wrapped(f"{name}  {spread(found['ours'])} {found['unit']}", "  ")
    for peer, its in found["peers"].items():
        if why := its.get("missing"):
            yield from _wrapped(f"  {'missing':<20} {wanted(found, its):<13} {peer}: {why}", " " * BESIDE)
            continue
        judged = f"{wanted(found, its)} {'met' if its['met'] else 'missed'}"
        yield from _wrapped(f"  {ratios(its):<20} {judged:<13} {peer}: {spread(its['figures'])}", " " * BESIDE)


def wanted(found: Facts, its: Facts) -> str:
    """Format the wanted ratio to a peer."""
    return f"{'≤' if found['less'] else '≥'} {its['target']:g}"


def ratios(its: Facts) -> str:
    """Format our ratio to a peer."""
    return spread(its["ratios"], "{:.2f}".format)


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def spread(figures: list[float], said: Callable[[float], str] = _number) -> str:
    """Format the median, with minimum and maximum if there are several figures."""
    middle, least, most = map(said, (median(figures), min(figures), max(figures)))
    return f"{middle} ({least} to {most})" if len(figures) > 1 else middle


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent)

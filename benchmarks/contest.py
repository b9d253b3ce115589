"""Contests: forgekeeper and its peers do the same work in turns; the ratio of each round counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple


class Missing(Exception):
    """A peer is missing on this machine; the message tells how to install it."""


@dataclass(frozen=True)
class Peer:
    """A peer for comparison; *target* is the wanted ratio of our figure to the peer's."""

    name: str
    measure: Callable[[], float]
    target: float


class Point(NamedTuple):
    """Result of a measurement at a size."""

    size: float
    figure: float


@dataclass(frozen=True)
class Curve:
    """A line in a picture; each measurement adds a point."""

    picture: str
    line: str
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmark:
    """A comparison: each contestant works, checks its result, and returns a figure in *unit*.

    More is better, and a target is the minimum ratio; if *less* is better, it is the maximum. A contestant may raise
    `Missing`, or `AssertionError` for a wrong result. *about* is a sentence for the list, by default the first sentence
    of its module.
    """

    name: str
    unit: str
    ours: Callable[[], float]
    peers: tuple[Peer, ...]
    less: bool = False
    about: str = ""
    curve: Curve | None = None


@dataclass
class Figures:
    """Results of the rounds in order; *missing* has the reason of a peer without figures."""

    ours: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, peer: str) -> list[float]:
        """Return our figure divided by the peer's, for each round."""
        return [ours / its for ours, its in zip(self.ours, self.peers[peer], strict=True)]

    def ratio(self, peer: str) -> float:
        """Return the median of the ratios."""
        return median(self.ratios(peer))


def compare(benchmark: Benchmark, *, rounds: int, told: Callable[[int], None] = lambda _number: None) -> Figures:
    """Let everybody do the work *rounds* times and call *told* after each round.

    The first contestant changes each round, because later ones find a warmer machine.
    """
    figures = Figures(peers={peer.name: [] for peer in benchmark.peers})
    for number in range(rounds):
        turns = [None, *(peer for peer in benchmark.peers if peer.name not in figures.missing)]
        first = number % len(turns)
        for peer in turns[first:] + turns[:first]:
            _turn(benchmark, peer, figures)
        told(number + 1)
    return figures


def _turn(benchmark: Benchmark, peer: Peer | None, figures: Figures) -> None:
    if peer is None:
        figures.ours.append(benchmark.ours())
        return
    try:
        figures.peers[peer.name].append(peer.measure())
    except Missing as error:
        figures.missing[peer.name] = str(error)
        figures.peers.pop(peer.name)

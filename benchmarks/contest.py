"""Ours and its peers do the same work in turns; what counts is the ratio of what each came to in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple


class Missing(Exception):
    """A peer is not on this machine; the message says what would bring it."""


@dataclass(frozen=True)
class Peer:
    """Whom we are compared with; *target* is the ratio, ours by the peer's, that we want to reach."""

    name: str
    measure: Callable[[], float]
    target: float


class Point(NamedTuple):
    """What one measurement came to at a size."""

    size: float
    figure: float


@dataclass(frozen=True)
class Curve:
    """A line in a picture; whoever measures adds a point each time."""

    picture: str
    line: str
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmark:
    """What is compared: each contestant does the work once, checks what came of it, and returns a figure in *unit*.

    More is better, and a target is the least ratio; where *less* is better it is the greatest.  A contestant may raise
    `Missing`, and whoever got a wrong answer `AssertionError`.  *about* is a sentence for a list; without one its
    module's first is taken.
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
    """What the rounds came to, in their order; *missing* says of a peer why it has no figures."""

    ours: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, peer: str) -> list[float]:
        """Return ours by the peer's, round by round."""
        return [ours / its for ours, its in zip(self.ours, self.peers[peer], strict=True)]

    def ratio(self, peer: str) -> float:
        """Return the median of the ratios."""
        return median(self.ratios(peer))


def compare(benchmark: Benchmark, *, rounds: int, told: Callable[[int], None] = lambda _number: None) -> Figures:
    """Let all do their work *rounds* times, another one first each time; call *told* after each round.

    Who comes second finds a warmer machine: nobody always does.
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

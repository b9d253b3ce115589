"""Two contestants that do the same work in turns, and the ratio of how fast they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Pair:
    """What is compared: each contestant does the work once and returns its rate, in *unit* a second.

    *target* is the ratio of ours to the peer's that we want to reach.
    """

    name: str
    unit: str
    ours: Callable[[], float]
    peer: Callable[[], float]
    peers_name: str
    target: float


@dataclass
class Figures:
    """The rates of the rounds, in their order: ours and the peer's of one round were measured one after the other."""

    ours: list[float] = field(default_factory=list)
    peers: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours by the peer's, round by round."""
        return [ours / peers for ours, peers in zip(self.ours, self.peers, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)


def compare(pair: Pair, *, rounds: int, told: Callable[[int], None] = lambda _number: None) -> Figures:
    """Let both do their work *rounds* times, by turns first; call *told* after each round with its number."""
    figures = Figures()
    for number in range(1, rounds + 1):
        # Who comes second finds a warmer machine: nobody always does.
        turns = [(pair.ours, figures.ours), (pair.peer, figures.peers)]
        for contestant, rates in turns if number % 2 else reversed(turns):
            rates.append(contestant())
        told(number)
    return figures

"""What a declaration brings for people: sample data, what proves that it was worked off, what `check` looks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from forgekeeper.audit.subjects import Subject
from forgekeeper.settings import Settings

if TYPE_CHECKING:
    from prometheus_client.samples import Sample as Series

Results = Sequence[Mapping[str, Any]]


class Sample(NamedTuple):
    """Sample data: what it is, how many in all, how many of them are due, and how many objects go with these.

    Due ones that *stay* are changed, and not removed.
    """

    what: str
    total: int
    due: int
    objects: int = 0
    stay: bool = False


class Figure(NamedTuple):
    """What the page of a process is to show: the sum of the series of *metric* that have these labels."""

    page: str
    metric: str
    labels: Mapping[str, str]
    done: float

    def shown(self, pages: Mapping[str, list[Series]]) -> float | None:
        """Return what is shown, None when there is no such series."""
        values = [
            sample.value
            for sample in pages[self.page]
            if sample.name == f"forgekeeper_{self.metric}" and self.labels.items() <= sample.labels.items()
        ]
        return sum(values) if values else None


def processed(batch: str, record: str, count: int) -> Figure:
    """Return the figure that so many records of a kind were processed."""
    return Figure("worker", "records_processed_total", {"batch": batch, "record": record}, count)


Make = Callable[[int, Settings], Sample]
Count = Callable[[Settings], Sample]
Prove = Callable[[Sample, Results], Iterator[Figure]]
Left = Callable[[], int]
Repositories = Callable[[int], dict[int, str]]
Objects = Callable[[str], Sequence[str]]


@dataclass(kw_only=True, eq=False)
class Brought:
    """What a batch brings, but for what it needs itself; *commands* is a module of the command line's."""

    commands: str | None = None
    samples: list[Make] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    proofs: list[Prove] = field(default_factory=list)
    leftovers: list[Left] = field(default_factory=list)
    known_repositories: list[Repositories] = field(default_factory=list)
    known_objects: list[Objects] = field(default_factory=list)
    asked_for: list[Subject] = field(default_factory=list)

    def sample(self, make: Make) -> Make:
        """Let `seed` and `demo` call the function for sample data, so many times the usual amount."""
        self.samples.append(make)
        return make

    def present(self, count: Count) -> Count:
        """Let `demo` ask the function how much there is of what the batch has sample data of."""
        self.counts.append(count)
        return count

    def proof(self, prove: Prove) -> Prove:
        """Let `demo` ask what the pages of metrics must show: of what was there, and of the runs' results."""
        self.proofs.append(prove)
        return prove

    def left(self, count: Left) -> Left:
        """Let `demo` wait until the function says 0, instead of until nothing is due."""
        self.leftovers.append(count)
        return count

    def repositories(self, look: Repositories) -> Repositories:
        """Let `check` ask the function for some projects, and where their repositories should be."""
        self.known_repositories.append(look)
        return look

    def objects(self, look: Objects) -> Objects:
        """Let `check` ask the function for some objects that should be at a location."""
        self.known_objects.append(look)
        return look

    def audited(self, subject: Subject) -> None:
        """Let `audit --what` ask for what the batch deletes, by a name that people have for it."""
        self.asked_for.append(subject)

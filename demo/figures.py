"""What the demo knows of a batch: its sample data, and what the metrics must show when that was worked off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.samples import Sample as Series

from forgekeeper.settings import Settings

Pages = Mapping[str, list[Series]]
"""What each process's metrics endpoint shows, by the name of its command."""
Results = Sequence[Mapping[str, Any]]
"""Those of the runs that succeeded."""


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
    """What a process must show: the series of *metric* with these labels add up to *done*."""

    page: str
    metric: str
    labels: Mapping[str, str]
    done: float

    def shown(self, pages: Pages) -> float | None:
        """Return what is shown, None when there is no such series."""
        values = [
            series.value
            for series in pages[self.page]
            if series.name == f"forgekeeper_{self.metric}" and self.labels.items() <= series.labels.items()
        ]
        return sum(values) if values else None


def processed(batch: str, record: str, count: int) -> Figure:
    """Return the figure that so many records of a kind were processed."""
    return Figure("worker", "records_processed_total", {"batch": batch, "record": record}, count)


@dataclass(frozen=True)
class SampleData:
    """A batch's sample data: *add* it so many times the usual amount, *count* what there is now.

    *figures* says what the metrics must show, of what was counted before and the runs' results.  *left* counts what is
    still to be done, where that is not the batch's backlog.
    """

    add: Callable[[int, Settings], Sample]
    count: Callable[[Settings], Sample]
    figures: Callable[[Sample, Results], Iterator[Figure]]
    left: Callable[[], int] | None = None

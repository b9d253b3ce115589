"""What a batch shows beyond its runs: backlogs, what was refused, gauges, a part of `status`, a preview."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from forgekeeper.database import now
from forgekeeper.database.queries import Backlog
from forgekeeper.declaring.preview import Preview
from forgekeeper.settings import Settings
from metrics.catalogue import Gauge, Reading, at

Look = Callable[[Settings], Iterator[Reading]]


class Entry(NamedTuple):
    """One of what was refused or given up; without *retry_at* it waits for a person."""

    key: str
    error: str
    failures: int
    since: datetime | None
    retry_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Refused:
    """What a document itself keeps of that: counted, listed oldest first, tried again, discarded; None stands for all.

    *record* names what the gauge counts, *redis* says that it lies in Redis.  Both acts return how many there were.
    """

    kind: str
    record: str
    count: Callable[[], int]
    entries: Callable[[Settings, int], Iterable[Entry]]
    retry: Callable[[Sequence[str] | None], int]
    discard: Callable[[Sequence[str] | None], int]
    redis: bool = False


class Collector(NamedTuple):
    """What the exporter asks when it is scraped; *database* says that it needs a connection, *gauges* are its own."""

    look: Look
    gauges: Sequence[Gauge] = ()
    database: bool = True


class Status(NamedTuple):
    """A part of `status`: *look* finds what `--json` shows, *sentence* says it to people."""

    look: Callable[[], Any]
    sentence: Callable[[Any], str]


@dataclass(kw_only=True, eq=False)
class Shown:
    """What a declaration shows; *collected_as* is the label of the collector that reads its backlogs."""

    name: str
    collected_as: str
    backlogs: dict[str, Callable[[datetime], Backlog]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    collectors: dict[str, Collector] = field(default_factory=dict)
    statuses: dict[str, Status] = field(default_factory=dict)
    previews: list[Preview] = field(default_factory=list)

    def backlog(self, record: str) -> Callable[[Callable[[datetime], Backlog]], Callable[[datetime], Backlog]]:
        """Let the function say how much of *record* is due at an instant, and since when."""

        def declare(look: Callable[[datetime], Backlog]) -> Callable[[datetime], Backlog]:
            self.backlogs[record] = look
            self.collectors.setdefault(self.collected_as, Collector(self._readings))
            return look

        return declare

    def quarantines(self, refused: Refused) -> None:
        """Let what the document itself keeps of what was refused lie in quarantine."""
        self.refused.append(refused)
        self.collectors.setdefault(self.collected_as, Collector(self._readings))

    def collector(self, name: str, *, gauges: Sequence[Gauge] = (), database: bool = True) -> Callable[[Look], Look]:
        """Let the exporter ask the function too, by that *name*; by the name of its backlogs, instead of them."""

        def declare(look: Look) -> Look:
            self.collectors[name] = Collector(look, tuple(gauges), database)
            return look

        return declare

    def status(self, name: str, look: Callable[[], Any], sentence: Callable[[Any], str]) -> None:
        """Let `status` show what *look* finds, as *name* in `--json`, as *sentence* to people."""
        self.statuses[name] = Status(look, sentence)

    def preview(self, look: Preview) -> Preview:
        """Let `run --dry-run` ask the function what a run would do; it must change nothing, and is kept from it."""
        self.previews.append(look)
        return look

    def _readings(self, _settings: Settings) -> Iterator[Reading]:
        instant = now()
        for record, look in self.backlogs.items():
            yield from backlog_readings(self.name, record, look(instant))
        for one in self.refused:
            yield Reading("quarantine_records", one.count(), (self.name, one.record))


def backlog_readings(batch: str, record: str, found: Backlog) -> Iterator[Reading]:
    """Yield how much is due, and since when if anything is."""
    yield Reading("backlog_records", found.records, (batch, record))
    yield from at("backlog_oldest_timestamp_seconds", found.oldest, batch, record)


def numbers(keys: Sequence[str] | None) -> list[int] | None:
    """Return the keys as the ids that they are; None for all."""
    return None if keys is None else [int(key) for key in keys if key.isdecimal()]

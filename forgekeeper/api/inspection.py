"""Looks of a batch: backlogs, refused records, gauges, a part of `status`, and a preview.

Each of these functions is registered as a look: whoever calls it, PostgreSQL lets it only read.

A preview counts by the same conditions as the run, at one instant, and changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from forgekeeper.api.answers import Backlog, Rows
from forgekeeper.platform.database import now, survey
from forgekeeper.platform.database.read_only import as_read_only
from forgekeeper.platform.settings import Settings
from metrics.catalogue import Gauge, Reading, read_instant

MAX_SHOWN_PROJECTS = 10
"""Projects that a preview names, beginning with the most records."""
PASSED_OVER_REASON = "passed_over"
"""Reason why a bad record stays for now: `forgekeeper quarantine` shows it."""
BUSY_REASON = "busy"
"""Reason why a row stays that another session has locked: it is left for later."""
ZERO_TIME = timedelta(0)
ReadMetrics = Callable[[Settings], Iterator[Reading]]


@dataclass
class PreviewPart:
    """The effect of a run on one kind of record; it grows while records are counted.

    *verb* names the effect.  With *estimate* the time was up before all records were counted.  *kept* has the numbers
    of records that look due and stay, by reason; None if the time to count them was up.
    """

    batch: str
    record: str
    verb: str = "deleted"
    records: int = 0
    estimate: bool = False
    bytes: int | None = None
    oldest: datetime | None = None
    projects: Counter[str] = field(default_factory=Counter)
    kept: dict[str, int | None] = field(default_factory=dict)
    sample: list[tuple[str, str | None]] = field(default_factory=list)

    def add_survey(self, found: survey.Survey, *, after: timedelta = ZERO_TIME) -> None:
        """Add the rows of a survey.  *after* is the time from a row's instant until it is due."""
        self.sample += [(row.id, row.name) for row in found.first or ()]
        if found.expected is None:
            for group in found.groups:
                self._add_group(group, after)
        else:
            self.set_estimate(found.expected)
            self.oldest = found.first[0].due + after if found.first else None

    def _add_group(self, group: survey.ProjectCounts, after: timedelta) -> None:
        """Add the rows of a project: a run would delete the free rows and leave the locked rows for later."""
        self.records += group.free
        self.add_kept(BUSY_REASON, group.rows - group.free)
        if group.bytes is not None:
            self.bytes = (self.bytes or 0) + group.bytes
        if group.oldest is not None:
            self._note_due(group.oldest + after)
        if group.project is not None and group.free:
            self.projects[group.project] += group.free

    def add_record(
        self, key: str, name: str | None, due: datetime | None, *, size: int, project: object = None
    ) -> None:
        """Count a single record."""
        self.records += 1
        self._note_due(due)
        if project is not None:
            self.projects[str(project)] += 1
        if len(self.sample) < size:
            self.sample.append((key, name))

    def _note_due(self, due: datetime | None) -> None:
        """Set the instant since when the oldest record is due, if *due* is before it."""
        self.oldest = min(filter(None, (self.oldest, due)), default=None)

    def add_kept(self, reason: str, records: int) -> None:
        """Add records that stay, with the reason."""
        if records:
            self.kept[reason] = (self.kept.get(reason) or 0) + records

    def set_estimate(self, records: int) -> None:
        """Estimate the number of all records, at least the number counted so far."""
        self.estimate, self.bytes, self.records = True, None, max(records, self.records)

    def as_json(self) -> dict[str, Any]:
        """Return the part as `--json` shows it: the largest projects, and the others summed."""
        most = dict(self.projects.most_common(MAX_SHOWN_PROJECTS))
        others = {"projects": len(self.projects) - len(most), "records": self.projects.total() - sum(most.values())}
        sample = [{"id": key, "name": name} for key, name in self.sample]
        return vars(self) | {"projects": most, "other_projects": others, "sample": sample}


@dataclass(frozen=True)
class PreviewContext:
    """The resources for the preview of a batch or of a child; *now* decides if a record is due.

    The preview has to end at *until*, an instant of the monotonic clock.  *size* is the number of records to name.
    *passed_over* returns the keys of a kind's bad records, which a run leaves out.  *on_progress* is called with each
    part as far as it has been counted.
    """

    batch: str
    now: datetime
    settings: Settings
    until: float
    sample_size: int = 10
    passed_over: Callable[[str], Collection[int]] = lambda _record: ()
    on_progress: Callable[[PreviewPart], None] = lambda _part: None

    def begin_part(self, record: str, *, verb: str = "deleted") -> PreviewPart:
        """Begin the part about a kind of record."""
        return PreviewPart(self.batch, record, verb)

    def is_over(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() >= self.until

    def within_share(self, share: float) -> PreviewContext:
        """Return a look that has this share of the remaining time."""
        now = time.monotonic()
        return replace(self, until=now + max(0.0, self.until - now) * share)

    def count_rows(self, part: PreviewPart, rows: survey.SurveyedRows, *, after: timedelta = ZERO_TIME) -> PreviewPart:
        """Count the rows, except bad records; estimate the rest if the time is up.

        A row is due the time *after* past its instant.
        """
        bad = self.passed_over(part.record)
        part.add_kept(PASSED_OVER_REASON, rows.count_among(bad) if bad else 0)
        part.add_survey(survey.survey_rows(rows, without=bad, size=self.sample_size, until=self.until), after=after)
        self.on_progress(part)
        return part

    def count_kept(self, part: PreviewPart, due: survey.SurveyedRows, reasons: Mapping[str, str]) -> None:
        """Count the rows that look due and stay, by the condition of each reason."""
        found = survey.answer_within(self.until, lambda: due.count_each(reasons))
        if found is None:
            part.kept |= dict.fromkeys(reasons, None)
            return
        for reason, records in found.items():
            part.add_kept(reason, records)


PreviewFunction = Callable[[PreviewContext], "Iterator[PreviewPart] | Sequence[PreviewPart]"]


FindRows = Callable[[datetime, Settings], "Iterable[Rows[Any]]"]


class RefusedEntry(NamedTuple):
    """A record that was refused or given up; without *retry_at* it waits for a person."""

    key: str
    error: str
    failures: int
    since: datetime | None
    retry_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class RefusedRecords:
    """Refused records that a batch stores itself: how to count, list, retry and discard them.

    The oldest entry is listed first.  *retry* and *discard* take keys, None for all, and return the number of records.
    *record* is the label of the gauge, *redis* says that the records are in Redis.
    """

    kind: str
    record: str
    count: Callable[[], int]
    entries: Callable[[Settings, int], Iterable[RefusedEntry]]
    retry: Callable[[Sequence[str] | None], int]
    discard: Callable[[Sequence[str] | None], int]
    redis: bool = False


class Collector(NamedTuple):
    """A function that the exporter calls on each scrape, with the *gauges* that it sets.

    *database* says that it needs a connection.
    """

    read: ReadMetrics
    gauges: Sequence[Gauge] = ()
    database: bool = True


class StatusPart(NamedTuple):
    """A part of `status`: *read* returns the value for `--json`, *sentence* a text about it."""

    read: Callable[[], Any]
    sentence: Callable[[Any], str]


@dataclass(kw_only=True, eq=False)
class InspectionHooks:
    """The looks of a declaration; *collected_as* labels the collector that reads its backlogs."""

    name: str
    collected_as: str
    backlogs: dict[str, Callable[[datetime], Backlog]] = field(default_factory=dict)
    refused: list[RefusedRecords] = field(default_factory=list)
    collectors: dict[str, Collector] = field(default_factory=dict)
    statuses: dict[str, StatusPart] = field(default_factory=dict)
    previews: list[PreviewFunction] = field(default_factory=list)
    shown_rows: list[FindRows] = field(default_factory=list)

    def add_backlog(self, record: str) -> Callable[[Callable[[datetime], Backlog]], Callable[[datetime], Backlog]]:
        """Let the function return the backlog of *record* at an instant."""

        def declare_backlog(look: Callable[[datetime], Backlog]) -> Callable[[datetime], Backlog]:
            self.backlogs[record] = as_read_only(self.name, look)
            self.collectors.setdefault(self.collected_as, Collector(self._read_backlogs))
            return look

        return declare_backlog

    def add_quarantine(self, refused: RefusedRecords) -> None:
        """Show refused records that the batch stores itself as quarantined records."""
        count, entries = as_read_only(self.name, refused.count), as_read_only(self.name, refused.entries)
        self.refused.append(replace(refused, count=count, entries=entries))
        self.collectors.setdefault(self.collected_as, Collector(self._read_backlogs))

    def add_collector(
        self, name: str, *, gauges: Sequence[Gauge] = (), database: bool = True
    ) -> Callable[[ReadMetrics], ReadMetrics]:
        """Let the exporter call the function, as the collector *name*.

        The name *collected_as* replaces the collector of the backlogs.
        """

        def declare_collector(look: ReadMetrics) -> ReadMetrics:
            self.collectors[name] = Collector(as_read_only(self.name, look), tuple(gauges), database)
            return look

        return declare_collector

    def add_status_part(self, name: str, look: Callable[[], Any], sentence: Callable[[Any], str]) -> None:
        """Let `status` show the result of *look*: as *name* in `--json`, as *sentence* to people."""
        self.statuses[name] = StatusPart(as_read_only(self.name, look), sentence)

    def add_preview(self, look: PreviewFunction) -> PreviewFunction:
        """Let `run --dry-run` call the function to preview a run; PostgreSQL refuses its writes."""
        self.previews.append(as_read_only(self.name, look))
        return look

    def add_shown_rows(self, find: FindRows) -> FindRows:
        """Let `peek` ask the function which rows of the forge's own tables are due at an instant."""
        self.shown_rows.append(find)
        return find

    def _read_backlogs(self, _settings: Settings) -> Iterator[Reading]:
        instant = now()
        for record, look in self.backlogs.items():
            yield from backlog_readings(self.name, record, look(instant))
        for one in self.refused:
            yield Reading("quarantine_records", one.count(), (self.name, one.record))


def backlog_readings(batch: str, record: str, found: Backlog) -> Iterator[Reading]:
    """Yield the number of due records, and the time of the oldest if there is one."""
    yield Reading("backlog_records", found.records, (batch, record))
    yield from read_instant("backlog_oldest_timestamp_seconds", found.oldest, batch, record)


def parse_ids(keys: Sequence[str] | None) -> list[int] | None:
    """Return the keys that are numbers, as ids; None for all."""
    return None if keys is None else [int(key) for key in keys if key.isdecimal()]

"""Questions to the audit: a record's fate, a run's deletions, the newest rows.

A row is a chunk.  Rows with many records are scanned by kind; an index finds rows with few records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from forgekeeper.api.answers import Subject
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import expand_records, hash_name
from forgekeeper.platform.database import database

LINE_COLUMNS = "id, at, batch, record, run, tick, child, phase, intent, ids, cardinality(hashes), detail"
LINE_SIZE = "greatest(cardinality(ids), cardinality(hashes))"
MAX_LINE_ID = 2**63 - 1
MIN_UNINDEXED_SIZE = 20
"""Rows with fewer records are in the index of ids and hashes: see migration 0010."""
# The planner lacks statistics of a new month, and parallel workers pay off if a hundred thousand rows are read.
SET_PLANNER_OPTIONS = """
    set local enable_seqscan = off; set local max_parallel_workers_per_gather = 4;
    set local parallel_setup_cost = 0; set local parallel_tuple_cost = 0;
"""
SELECT_BY_KEY = f"""
    select {LINE_COLUMNS} from audit_deletions
    where {LINE_SIZE} < {MIN_UNINDEXED_SIZE} and {{column}} @> array[%(key)s]::{{kind}}[]{{where}}
    union all
    select {LINE_COLUMNS} from audit_deletions
    where {LINE_SIZE} >= {MIN_UNINDEXED_SIZE} and %(key)s = any({{column}}){{where}}
    order by 1 desc limit %(limit)s
"""
KEY_COLUMN_TYPES = {"ids": "bigint", "hashes": "integer"}
SELECT_CLOSED_INTENTS = "select distinct intent from audit_deletions where intent = any(%s::bigint[])"
SELECT_OLDEST_TIME = "select min(at) from (select at from audit_deletions order by id limit 1) as first"
# A run has few rows: `id + 0` reads all of them backwards by id until the limit is reached.
SELECT_OF_RUN = (
    f"select {LINE_COLUMNS} from audit_deletions where run = %(run)s and id + 0 < %(before)s{{where}}"
    " order by id + 0 desc limit %(limit)s"
)
# The limit is applied first: with few rows since then, PostgreSQL would otherwise read all earlier rows.
SELECT_NEWEST = f"""
    select * from (
        select {LINE_COLUMNS} from audit_deletions where id < %(before)s order by id desc limit %(limit)s
    ) as newest where true{{where}}
"""
PROJECT_DETAIL = "project_id"
"""The detail with the id of the record's project."""
MAX_SEARCHED_LINES, MAX_MATCHING_LINES = 50_000, 300
"""Maximum rows of a batch that are searched for a project, and maximum matching rows that are decoded."""
FROM_LINES_OF_BATCH = "from audit_deletions where batch = %(batch)s and at >= %(since)s order by at desc limit %(rows)s"
COUNT_SEARCHED_LINES = f"select count(*) from (select 1 {FROM_LINES_OF_BATCH}) as looked"
SELECT_OF_PROJECT = f"""
    select {LINE_COLUMNS} from (select * {FROM_LINES_OF_BATCH}) as looked
    where detail->'{PROJECT_DETAIL}' @> to_jsonb(%(project)s::bigint) order by id desc limit %(limit)s
"""
# The limit also bounds the search in a batch that deletes many records of another kind.
SELECT_LAST_RUNS = """
    select run, max(at) from (
        select * from audit_deletions where batch = %(batch)s and at >= %(since)s order by at desc limit 1000
    ) as newest where record = %(record)s and phase <> 'intent' and run is not null
    group by run order by 2 desc limit %(limit)s
"""
SELECT_CHILDREN = """
    select child, min(at), max(at), count(*) from audit_deletions
    where run = %(run)s and child is not null group by child order by min(at), child limit %(limit)s
"""
SUM_BY_STATE = f"""
    select batch, record, state, sum(records)::bigint, min(at), max(at)
    from audit_deletions as line, lateral (
        select 'deleted' as state,
            case when {LINE_SIZE} > 0 then {LINE_SIZE} else (detail->>'count')::bigint end as records
        where phase = 'done'
        union all
        select detail->>'state', {LINE_SIZE} where phase = 'outcome' and jsonb_typeof(detail->'state') = 'string'
        union all
        select value, 1 from jsonb_array_elements_text(
            case when phase = 'outcome' and jsonb_typeof(detail->'state') = 'array' then detail->'state' else '[]' end
        ) as value
        union all
        select 'not known yet', {LINE_SIZE}
        where phase = 'intent' and not exists (select from audit_deletions as closing where closing.intent = line.id)
    ) as became
    where run = %(run)s
    group by batch, record, state order by min(at), batch, record, state
"""


PATH_SUBJECT = Subject("path", "[LOCATION:]PATH", None, name="path", within="location")
"""Any object at the path; every batch that deletes objects audits their paths."""


class AuditLine(NamedTuple):
    """A row of the audit: a chunk of records that are deleted or about to be deleted."""

    id: int
    at: datetime
    batch: str
    record: str
    run: int | None
    tick: datetime | None
    child: str | None
    phase: str
    intent: int | None
    ids: Sequence[int]
    names: int
    detail: Mapping[str, Any]

    @property
    def record_count(self) -> int:
        """The number of records in the row."""
        return max(len(self.ids), self.names) or self.detail.get("count") or 0

    def as_json(self) -> dict[str, Any]:
        """Return the row as `--json` shows it."""
        return self._asdict() | {"records": self.record_count}

    def iterate_records(self) -> Iterator[dict[str, Any]]:
        """Yield the details of each record, its id included."""
        return expand_records(self.ids, self.detail, max(len(self.ids), self.names))


class AuditedRecord(NamedTuple):
    """A record in the audit, with its *state*; None while the state is unknown."""

    line: AuditLine
    facts: Mapping[str, Any]
    state: str | None


def find_records(subject: Subject, asked: str, since: datetime | None, *, limit: int) -> list[AuditedRecord]:
    """Return the records with the *asked* id or name, the latest first."""
    if subject.name is None:
        return _find_states(_select_lines("ids", int(asked), subject.record, since, limit), {"id": int(asked)})
    within, name = _split_owner(subject, asked)
    found = _find_states(_select_lines("hashes", hash_name(name), subject.record, since, limit), {subject.name: name})
    return [one for one in found if within is None or str(one.facts.get(subject.within or "")) == within]


def _split_owner(subject: Subject, asked: str) -> tuple[str | None, str]:
    """Split the owner from the name; a path may have no location."""
    within, colon, name = asked.partition(":")
    optional = subject.argument.startswith("[")
    if not colon or (optional and ("/" in within or not within.isidentifier())):
        return None, asked
    return within, name


def _select_lines(column: str, key: int, record: str | None, since: datetime | None, limit: int) -> list[AuditLine]:
    where = f"{' and record = %(record)s' if record else ''}{_since_condition(since)}"
    values = {"key": key, "record": record, "limit": limit, "since": since}
    with database.atomic():
        database.execute_sql(SET_PLANNER_OPTIONS)
        rows = database.execute_sql(
            SELECT_BY_KEY.format(column=column, kind=KEY_COLUMN_TYPES[column], where=where), values
        ).fetchall()
    return [AuditLine(*row) for row in rows]


def _find_states(lines: Sequence[AuditLine], wanted: Mapping[str, Any]) -> list[AuditedRecord]:
    """Return the *wanted* records in *lines*, without intents whose outcome has the record."""
    found = [(line, facts) for line in lines for facts in line.iterate_records() if wanted.items() <= facts.items()]
    intents = [line.id for line, _ in found if line.phase == "intent"]
    closed = (
        {number for (number,) in database.execute_sql(SELECT_CLOSED_INTENTS, (intents,)).fetchall()} if intents else ()
    )
    said = {line.intent for line, _ in found if line.phase == "outcome"}
    states = {"done": "deleted", "intent": None}
    return [
        AuditedRecord(
            line, facts, "kept" if line.id in closed else states.get(line.phase, facts.get("state", "deleted"))
        )
        for line, facts in found
        if line.id not in said
    ]


def list_newest(
    since: datetime | None, *, limit: int, run: int | None = None, before: int | None = None
) -> list[AuditLine]:
    """Return the newest rows since then, or ever, optionally of one *run* or with ids below *before*."""
    values = {"run": run, "since": since, "limit": limit, "before": MAX_LINE_ID if before is None else before}
    statement = (SELECT_NEWEST if run is None else SELECT_OF_RUN).format(where=_since_condition(since))
    return [AuditLine(*row) for row in database.execute_sql(statement, values).fetchall()]


def list_of_project(project: int, batch: str, since: datetime) -> tuple[list[AuditedRecord], bool]:
    """Return a batch's records of a project since then, and whether they are complete.

    The latest record is first.  Searches the latest `MAX_SEARCHED_LINES` rows, because no index has projects.
    """
    values = {
        "project": project,
        "batch": batch,
        "since": since,
        "rows": MAX_SEARCHED_LINES,
        "limit": MAX_MATCHING_LINES,
    }
    (looked,) = database.execute_sql(COUNT_SEARCHED_LINES, values).fetchone()
    lines = [AuditLine(*row) for row in database.execute_sql(SELECT_OF_PROJECT, values).fetchall()]
    return _find_states(lines, {PROJECT_DETAIL: project}), looked < MAX_SEARCHED_LINES and len(
        lines
    ) < MAX_MATCHING_LINES


def list_last_runs(batch: str, record: str, since: datetime, *, limit: int) -> list[tuple[int, datetime]]:
    """Return the last runs that deleted such records, with each run's last deletion time.

    The newest run is first.  Searches the batch's newest thousand rows since then.
    """
    values = {"batch": batch, "record": record, "since": since, "limit": limit}
    found: list[tuple[int, datetime]] = database.execute_sql(SELECT_LAST_RUNS, values).fetchall()
    return found


def list_acts(
    since: datetime | None,
    *,
    limit: int,
    who: str | None = None,
    before: int | None = None,
    batch: str | None = None,
    until: datetime | None = None,
) -> list[Act]:
    """Return the newest acts of people since then, or ever, with ids below *before* if given.

    *who* is their user, host or actor, *batch* the batch that they name; none is later than *until*.
    """
    query = Act.select().order_by(Act.id.desc()).limit(limit)
    query = query if batch is None else query.where(Act.batch == batch)
    query = query if until is None else query.where(Act.at <= until)
    query = query if before is None else query.where(Act.id < before)
    if who:
        query = query.where((Act.by_user == who) | (Act.by_host == who) | (Act.actor == who))
    return list(query if since is None else query.where(Act.at >= since))


def find_latest_acts(*names: str) -> dict[str, Act]:
    """Return the last act with one of these names for each thing, by the thing."""
    query = Act.select().distinct(Act.what).where(Act.act.in_(names)).order_by(Act.what, Act.id.desc())
    return {act.what: act for act in query}


def _since_condition(since: datetime | None) -> str:
    """Return the SQL condition; with it PostgreSQL reads only the months since then."""
    return "" if since is None else " and at >= %(since)s"


class DeletionTotal(NamedTuple):
    """Number of a run's records of one kind and state."""

    batch: str
    record: str
    state: str
    records: int
    first: datetime
    last: datetime


class ChildDeletions(NamedTuple):
    """A child in the audit: the times of the *first* and the *last* of its *rows*."""

    child: str
    first: datetime
    last: datetime
    rows: int


def list_children(run: int, *, limit: int) -> list[ChildDeletions]:
    """Return the run's children that deleted something, by the time of their first deletion."""
    values = {"run": run, "limit": limit}
    return [ChildDeletions(*row) for row in database.execute_sql(SELECT_CHILDREN, values).fetchall()]


def has_more_rows(rows: int, run: int) -> bool:
    """Return whether the audit has more than *rows* rows of the run, its children included."""
    found = database.execute_sql("select from audit_deletions where run = %s limit %s", (run, rows + 1))
    return bool(found.rowcount > rows)


def sum_by_state(run: int) -> list[DeletionTotal]:
    """Add up the deletions of a run, its children included."""
    return [DeletionTotal(*row) for row in database.execute_sql(SUM_BY_STATE, {"run": run}).fetchall()]


def find_oldest_time() -> datetime | None:
    """Return the time of the oldest deletion in the audit."""
    oldest: datetime | None = database.execute_sql(SELECT_OLDEST_TIME).fetchone()[0]
    return oldest

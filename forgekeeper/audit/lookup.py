"""Questions to the audit: a record's fate, a run's deletions, the newest rows.

A row is a chunk.  Rows with many records are scanned by kind; an index finds rows with few records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from forgekeeper.api.answers import Subject
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import each_of, hashed
from forgekeeper.platform.database import database

SHOWN = "id, at, batch, record, run, tick, child, phase, intent, ids, cardinality(hashes), detail"
SIZE = "greatest(cardinality(ids), cardinality(hashes))"
LAST = 2**63 - 1
FEW = 20
"""Rows with fewer records are in the index of ids and hashes: see migration 0010."""
# The planner lacks statistics of a new month, and parallel workers pay off if a hundred thousand rows are read.
PLAN = """
    set local enable_seqscan = off; set local max_parallel_workers_per_gather = 4;
    set local parallel_setup_cost = 0; set local parallel_tuple_cost = 0;
"""
FOUND = f"""
    select {SHOWN} from audit_deletions where {SIZE} < {FEW} and {{column}} @> array[%(key)s]::{{kind}}[]{{where}}
    union all
    select {SHOWN} from audit_deletions where {SIZE} >= {FEW} and %(key)s = any({{column}}){{where}}
    order by 1 desc limit %(limit)s
"""
KINDS = {"ids": "bigint", "hashes": "integer"}
CLOSED = "select distinct intent from audit_deletions where intent = any(%s::bigint[])"
OLDEST = "select min(at) from (select at from audit_deletions order by id limit 1) as first"
# A run has few rows: `id + 0` reads all of them backwards by id until the limit is reached.
OF_RUN = f"select {SHOWN} from audit_deletions where run = %(run)s{{where}} order by id + 0 desc limit %(limit)s"
# The limit is applied first: with few rows since then, PostgreSQL would otherwise read all earlier rows.
NEWEST = f"""
    select * from (
        select {SHOWN} from audit_deletions where id < %(before)s order by id desc limit %(limit)s
    ) as newest where true{{where}}
"""
PROJECT = "project_id"
"""The detail with the id of the record's project."""
LOOKED_AT, MATCHING = 50_000, 300
"""Maximum rows of a batch that are searched for a project, and maximum matching rows that are decoded."""
OF_BATCH = "from audit_deletions where batch = %(batch)s and at >= %(since)s order by at desc limit %(rows)s"
LOOKED = f"select count(*) from (select 1 {OF_BATCH}) as looked"
OF_PROJECT = f"""
    select {SHOWN} from (select * {OF_BATCH}) as looked
    where detail->'{PROJECT}' @> to_jsonb(%(project)s::bigint) order by id desc limit %(limit)s
"""
# The limit also bounds the search in a batch that deletes many records of another kind.
LAST_RUNS = """
    select run, max(at) from (
        select * from audit_deletions where batch = %(batch)s and at >= %(since)s order by at desc limit 1000
    ) as newest where record = %(record)s and phase <> 'intent' and run is not null
    group by run order by 2 desc limit %(limit)s
"""
OF_CHILDREN = """
    select child, min(at), max(at), count(*) from audit_deletions
    where run = %(run)s and child is not null group by child order by min(at), child limit %(limit)s
"""
TOTALS = f"""
    select batch, record, state, sum(records)::bigint, min(at), max(at)
    from audit_deletions as line, lateral (
        select 'deleted' as state, case when {SIZE} > 0 then {SIZE} else (detail->>'count')::bigint end as records
        where phase = 'done'
        union all
        select detail->>'state', {SIZE} where phase = 'outcome' and jsonb_typeof(detail->'state') = 'string'
        union all
        select value, 1 from jsonb_array_elements_text(
            case when phase = 'outcome' and jsonb_typeof(detail->'state') = 'array' then detail->'state' else '[]' end
        ) as value
        union all
        select 'not known yet', {SIZE}
        where phase = 'intent' and not exists (select from audit_deletions as closing where closing.intent = line.id)
    ) as became
    where run = %(run)s
    group by batch, record, state order by min(at), batch, record, state
"""


PATH = Subject("path", "[LOCATION:]PATH", None, name="path", within="location")
"""Any object at the path; every batch that deletes objects audits their paths."""


class Line(NamedTuple):
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
    def size(self) -> int:
        """The number of records in the row."""
        return max(len(self.ids), self.names) or self.detail.get("count") or 0

    def as_json(self) -> dict[str, Any]:
        """Return the row as `--json` shows it."""
        return self._asdict() | {"records": self.size}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the details of each record, its id included."""
        return each_of(self.ids, self.detail, max(len(self.ids), self.names))


class Found(NamedTuple):
    """A record in the audit, with its *state*; None while the state is unknown."""

    line: Line
    facts: Mapping[str, Any]
    state: str | None


def find(subject: Subject, asked: str, since: datetime | None, *, limit: int) -> list[Found]:
    """Return the records with the *asked* id or name, the latest first."""
    if subject.name is None:
        return _became(_lines("ids", int(asked), subject.record, since, limit), {"id": int(asked)})
    within, name = _parted(subject, asked)
    found = _became(_lines("hashes", hashed(name), subject.record, since, limit), {subject.name: name})
    return [one for one in found if within is None or str(one.facts.get(subject.within or "")) == within]


def _parted(subject: Subject, asked: str) -> tuple[str | None, str]:
    """Split the owner from the name; a path may have no location."""
    within, colon, name = asked.partition(":")
    optional = subject.argument.startswith("[")
    if not colon or (optional and ("/" in within or not within.isidentifier())):
        return None, asked
    return within, name


def _lines(column: str, key: int, record: str | None, since: datetime | None, limit: int) -> list[Line]:
    where = f"{' and record = %(record)s' if record else ''}{_since(since)}"
    values = {"key": key, "record": record, "limit": limit, "since": since}
    with database.atomic():
        database.execute_sql(PLAN)
        rows = database.execute_sql(FOUND.format(column=column, kind=KINDS[column], where=where), values).fetchall()
    return [Line(*row) for row in rows]


def _became(lines: Sequence[Line], wanted: Mapping[str, Any]) -> list[Found]:
    """Return the *wanted* records in *lines*, without intents whose outcome has the record."""
    found = [(line, facts) for line in lines for facts in line.records() if wanted.items() <= facts.items()]
    intents = [line.id for line, _ in found if line.phase == "intent"]
    closed = {number for (number,) in database.execute_sql(CLOSED, (intents,)).fetchall()} if intents else ()
    said = {line.intent for line, _ in found if line.phase == "outcome"}
    states = {"done": "deleted", "intent": None}
    return [
        Found(line, facts, "kept" if line.id in closed else states.get(line.phase, facts.get("state", "deleted")))
        for line, facts in found
        if line.id not in said
    ]


def newest(since: datetime | None, *, limit: int, run: int | None = None, before: int | None = None) -> list[Line]:
    """Return the newest rows since then, or ever, of one *run* or with ids below *before*."""
    values = {"run": run, "since": since, "limit": limit, "before": LAST if before is None else before}
    statement = (NEWEST if run is None else OF_RUN).format(where=_since(since))
    return [Line(*row) for row in database.execute_sql(statement, values).fetchall()]


def of_project(project: int, batch: str, since: datetime) -> tuple[list[Found], bool]:
    """Return a batch's records of a project since then, and whether they are complete.

    The latest record is first.  Searches the latest `LOOKED_AT` rows, because no index has projects.
    """
    values = {"project": project, "batch": batch, "since": since, "rows": LOOKED_AT, "limit": MATCHING}
    (looked,) = database.execute_sql(LOOKED, values).fetchone()
    lines = [Line(*row) for row in database.execute_sql(OF_PROJECT, values).fetchall()]
    return _became(lines, {PROJECT: project}), looked < LOOKED_AT and len(lines) < MATCHING


def last_runs(batch: str, record: str, since: datetime, *, limit: int) -> list[tuple[int, datetime]]:
    """Return the last runs that deleted such records, with each run's last deletion time.

    The newest run is first.  Searches the batch's newest thousand rows since then.
    """
    values = {"batch": batch, "record": record, "since": since, "limit": limit}
    found: list[tuple[int, datetime]] = database.execute_sql(LAST_RUNS, values).fetchall()
    return found


def acts(
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


def latest(*names: str) -> dict[str, Act]:
    """Return the last act with one of these names for each thing, by the thing."""
    query = Act.select().distinct(Act.what).where(Act.act.in_(names)).order_by(Act.what, Act.id.desc())
    return {act.what: act for act in query}


def _since(since: datetime | None) -> str:
    """Return the SQL condition; with it PostgreSQL reads only the months since then."""
    return "" if since is None else " and at >= %(since)s"


class Total(NamedTuple):
    """Number of a run's records of one kind and state."""

    batch: str
    record: str
    state: str
    records: int
    first: datetime
    last: datetime


class OfChild(NamedTuple):
    """A child in the audit: the times of the *first* and the *last* of its *rows*."""

    child: str
    first: datetime
    last: datetime
    rows: int


def children(run: int, *, limit: int) -> list[OfChild]:
    """Return the run's children that deleted something, by the time of their first deletion."""
    values = {"run": run, "limit": limit}
    return [OfChild(*row) for row in database.execute_sql(OF_CHILDREN, values).fetchall()]


def more_than(rows: int, run: int) -> bool:
    """Return whether the audit has more than *rows* rows of the run, its children included."""
    found = database.execute_sql("select from audit_deletions where run = %s limit %s", (run, rows + 1))
    return bool(found.rowcount > rows)


def totals(run: int) -> list[Total]:
    """Add up the deletions of a run, its children included."""
    return [Total(*row) for row in database.execute_sql(TOTALS, {"run": run}).fetchall()]


def reaches_back() -> datetime | None:
    """Return the time of the oldest deletion in the audit."""
    oldest: datetime | None = database.execute_sql(OLDEST).fetchone()[0]
    return oldest

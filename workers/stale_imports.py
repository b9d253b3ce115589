"""Give up bulk imports that nothing has touched for a day (batch 65).

Runs every four hours.  First all stale imports, then all stale entities, each with its
trackers; oldest first, in pages, for at most ten minutes.  A record that raises is passed
over: it does not stand in the way of the others, now or in four hours.

An unfinished record becomes *timeout*, and no other does: each change is one statement that
repeats the whole condition, so whatever moved on meanwhile is left alone.  Rows that another
transaction has locked are being moved on, and are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import structlog

from forgekeeper.audit.deletions import Audit
from forgekeeper.audit.subjects import Subject
from forgekeeper.batches import Record, batch
from forgekeeper.brought import Figure, Results, Sample, processed
from forgekeeper.database import chosen, database, now
from forgekeeper.database.backlog import Backlog
from forgekeeper.database.chunks import START, page
from forgekeeper.database.stakes import Stake
from forgekeeper.database.survey import Rows, held
from forgekeeper.preview import Look, Part
from forgekeeper.runs.run import Run
from forgekeeper.settings import Settings
from models import STALE_AFTER, BulkImport, BulkImportEntity, BulkImportTracker, EntityType

PAGE_SIZE = 100
MAX_RUNTIME = timedelta(minutes=10)
UNTOUCHED = "nothing had touched it for a day"

STALE = "status in (0, 1) and updated_at < %(horizon)s"
UNFINISHED = "status in (0, 1, 3)"
"""What is given up, and which trackers with it; what `run --dry-run` counts, too."""

# As the forge does, an import has failures where one of its entities has any; those are asked for once a page.
TIME_OUT_IMPORTS = f"""
    {{begin}}update bulk_imports set status = 3, updated_at = %(now)s,
        has_failures = has_failures or id = any(array(
            select bulk_import_id from bulk_import_entities where bulk_import_id = any(%(ids)s) and has_failures
        ))
    where id = any(array(
        select id from bulk_imports
        where id = any(%(ids)s) and {STALE}
        order by id
        for update skip locked
    )) and {STALE}
    returning id, 0{{audited}}
"""
# The trackers are locked in the order of their ids before any is changed: an importer that
# changes several would otherwise meet us half-way.  Nothing is half: it is one statement.
# They are counted for all entities at once: counted for each, those of the whole page were read
# for each, a third of the statement's time (14 ms of 21: `python -m benchmarks imports`).
TIME_OUT_ENTITIES = f"""
    with claimed as materialized (
        select id from bulk_import_entities
        where id = any(%(ids)s) and {STALE}
        order by id
        for update skip locked
    ), unfinished as materialized (
        select id from bulk_import_trackers
        where bulk_import_entity_id = any(array(select id from claimed)) and {UNFINISHED}
        order by id
        for update
    ), timed_out as (
        update bulk_import_trackers set status = 4, updated_at = %(now)s
        where id = any(array(select id from unfinished)) and {UNFINISHED}
        returning bulk_import_entity_id
    ), counted as materialized (
        select bulk_import_entity_id, count(*) as trackers from timed_out group by bulk_import_entity_id
    )
    {{begin}}update bulk_import_entities as entity set status = 3, updated_at = %(now)s
    where id = any(array(select id from claimed)) and {STALE}
    returning id, bulk_import_id, source_type, source_full_path, destination_name, destination_namespace,
        coalesce((select trackers from counted where bulk_import_entity_id = entity.id), 0) as trackers{{audited}}
"""
# Where it is in the audit the last step is one of several, and what it has changed is said once more.
GIVEN_UP = {"bulk_import": "with given_up as (", "entity": ", given_up as ("}
AUDITED = {
    "bulk_import": {},
    "entity": {
        "bulk_import_id": "bulk_import_id",
        "source_full_path": "source_full_path",
        "trackers": "given_up.trackers",
    },
}
# Of five imports one has stalled, with two entities of four trackers each; the others are fresh or done.
SAMPLE = """
    with made as (
        insert into bulk_imports (user_id, status, updated_at)
        select n, case when n %% 5 = 4 then 2 else n %% 2 end,
            clock_timestamp() - case when n %% 5 in (0, 4) then interval '2 days' else interval '1 hour' end
        from generate_series(0, %(total)s - 1) as n
        returning id, status, updated_at
    ), entities as (
        insert into bulk_import_entities
            (bulk_import_id, source_full_path, destination_name, destination_namespace, status, updated_at)
        select id, 'group/sample-' || id, 'sample-' || which, 'imported', status, updated_at
        from made, generate_series(1, 2) as which
        returning id, status, updated_at
    )
    insert into bulk_import_trackers (bulk_import_entity_id, relation, status, updated_at)
    select id, 'relation-' || stage, case when status = 2 then 2 else (array[0, 1, 3, 2])[stage] end, updated_at
    from entities, generate_series(1, 4) as stage
"""
ENTITY_TYPES = {each.value: each.name.lower() for each in EntityType}

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Kind:
    """What is given up, in pages: imports, or entities with their trackers.

    *record* names one that is bad.  *time_out* returns for each what it was, and how many trackers went
    with it; *message* and *facts* make the document's log line of that.
    """

    record: Literal["bulk_import", "entity"]
    model: type[BulkImport | BulkImportEntity]
    time_out: str
    message: str
    facts: Callable[[Sequence[Any]], dict[str, Any]]


@dataclass
class Outcome:
    """What a run comes to; it grows with each page."""

    imports: int = 0
    entities: int = 0
    trackers: int = 0
    skipped: int = 0
    failed: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(
    document=65,
    cron="0 */4 * * *",
    cron_sentence="When stalled bulk imports are given up.",
    pace_sentence="Imports and entities given up per second; unset: no limit.",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=12),
    team="log-monitoring",
    outcome=Outcome,
    tables=[BulkImport, BulkImportEntity, BulkImportTracker],
    records=[
        Record(
            "bulk_import_or_entity",
            examined=("imports", "entities", "skipped", "failed"),
            # The outcome's `failed`, which the document names, counts them.
            errors={"state_transition": ("failed",)},
        ),
        Record("bulk_import", processed=("imports",), objective=timedelta(hours=8)),
        Record("entity", processed=("entities",), objective=timedelta(hours=8)),
        Record("tracker", processed=("trackers",)),
    ],
    collector="imports",
    steps=["timed_out"],
)
def stale_imports(run: Run[Outcome]) -> None:
    """Give up bulk imports that nothing has touched for a day."""
    if not all(_sweep(kind, run) for kind in KINDS):
        run.outcome.stopped = "deadline"


def _sweep(kind: Kind, run: Run[Outcome]) -> bool:
    """Time out all of one kind; return False when the budget ended first."""
    position, outcome, stale = START, run.outcome, kind.model.stale(run.now)
    with run.bad_records(kind.record, stale, error_kind=None) as bad:
        while limit := run.allowed(PAGE_SIZE):
            found = page(stale, kind.model.updated_at, position, limit=limit, without=bad.keys)
            if not found:
                return True
            position, failed = found[-1], bad.failed
            try:
                bad.each(partial(_clean_up, kind, run), [each.key for each in found])
            finally:
                outcome.failed += bad.failed - failed
            done = outcome.imports + outcome.entities - run.deadline.done
            outcome.skipped += len(found) - done - (bad.failed - failed)
            run.step("timed_out")
            if run.deadline.passed(done):
                break
        return False


def cleanup_stale(
    kind: Kind, now: datetime, ids: Sequence[int], *, audit: Audit | None = None
) -> list[tuple[Any, ...]]:
    """Time those records out, unless somebody moved them on first; return the rows of the ones we did.

    An entity goes with its unfinished trackers, or not at all: where one stays locked, this
    raises `peewee.OperationalError`.  The same statement says in the *audit* what it has timed out.
    """
    begin = ""
    if audited := audit.clause(kind.record, "given_up", id="id", **AUDITED[kind.record]) if audit else "":
        begin, audited = GIVEN_UP[kind.record], f"){audited} select * from given_up"
    values = {"ids": list(ids), "now": now, "horizon": now - STALE_AFTER} | (audit.values if audit else {})
    statement = kind.time_out.format(begin=begin, audited=audited)
    rows: list[tuple[Any, ...]] = database.execute_sql(statement, values).fetchall()
    return rows


def _clean_up(kind: Kind, run: Run[Outcome], ids: Sequence[int]) -> None:
    """Time those records out, and say so of each."""
    rows = cleanup_stale(kind, run.now, ids, audit=run.audit)
    if kind is IMPORTS:
        run.outcome.imports += len(rows)
    else:
        run.outcome.entities += len(rows)
    run.outcome.trackers += sum(trackers for *_, trackers in rows)
    for row in rows:
        # The document's two lines, at its level; they come after the commit.
        log.error(kind.message, **kind.facts(row))


def _entity_facts(row: Sequence[Any]) -> dict[str, Any]:
    return {
        "bulk_import_entity_id": row[0],
        "bulk_import_id": row[1],
        "bulk_import_entity_type": ENTITY_TYPES.get(row[2], row[2]),
        "source_full_path": row[3],
        "destination_name": row[4],
        "destination_namespace": row[5],
    }


IMPORTS = Kind(
    "bulk_import", BulkImport, TIME_OUT_IMPORTS, "BulkImport stale", facts=lambda row: {"bulk_import_id": row[0]}
)
ENTITIES = Kind("entity", BulkImportEntity, TIME_OUT_ENTITIES, "BulkImports::Entity stale", facts=_entity_facts)
KINDS = (IMPORTS, ENTITIES)


stale_imports.audited(Subject("import", "ID", "bulk_import", gone="was given up", done="given up", because=UNTOUCHED))
stale_imports.audited(
    Subject("entity", "ID", "entity", gone="was given up with its trackers", done="given up", because=UNTOUCHED)
)


@stale_imports.backlog("bulk_import")
def stale(now: datetime) -> Backlog:
    """Count the stale imports, each due since a day after it was touched last."""
    return _backlog(BulkImport, now)


@stale_imports.backlog("entity")
def stale_entities(now: datetime) -> Backlog:
    """Count the stale entities likewise."""
    return _backlog(BulkImportEntity, now)


@stale_imports.at_stake
def at_stake(now: datetime) -> Stake:
    """Look at the stale imports and entities, of all."""
    return Stake.rows(BulkImport.stale(now), BulkImportEntity.stale(now))


def _backlog(model: type[BulkImport | BulkImportEntity], now: datetime) -> Backlog:
    found = model.stale(now).order_by(model.updated_at)
    return Backlog.of(found, oldest=model.updated_at, after=STALE_AFTER)


@stale_imports.preview
def foreseen(look: Look) -> Iterator[Part]:
    """Count the imports and entities that would be given up, and the trackers that would go with these."""
    values: dict[str, Any] = {"horizon": look.now - STALE_AFTER}
    entities = "bulk_import_entities"
    for share, kind, table, name in (
        (1 / 3, IMPORTS, "bulk_imports", "'of user ' || user_id"),
        (1 / 2, ENTITIES, entities, "source_full_path"),
    ):
        part = look.part(kind.record, verb="given up")
        yield look.count(part, Rows(table, STALE, values, due="updated_at", name=name), after=STALE_AFTER, share=share)
    part, bad = look.part("tracker", verb="given up"), list(look.passed_over(ENTITIES.record))
    going = f"select id from {entities} where {STALE} and not {held(entities)}{chosen('id', without=bad)}"
    of_those = f"{UNFINISHED} and bulk_import_entity_id in ({going})"
    values |= {"without": bad}
    look.count(part, Rows("bulk_import_trackers", of_those, values, due="updated_at", name="relation"))
    # They go with their entities, whenever they were touched.
    part.oldest = part.newest = None
    yield part


def sample(total: int) -> int:
    """Add *total* bulk imports with entities and trackers; return how many have stalled."""
    database.execute_sql(SAMPLE, {"total": total})
    return sum(n % 5 == 0 for n in range(total))


@stale_imports.sample
def add_sample(scale: int, _settings: Settings) -> Sample:
    """Add bulk imports, some of them due."""
    total = 200 * scale
    return Sample("bulk imports", total, sample(total))


@stale_imports.present
def present(_settings: Settings) -> Sample:
    """Count what there is, and what is due."""
    return Sample("bulk imports", BulkImport.select().count(), BulkImport.stale(now()).count(), stay=True)


@stale_imports.proof
def proof(before: Sample, results: Results) -> Iterator[Figure]:
    """Say what the pages of metrics show of it."""
    yield processed("stale_imports", "bulk_import", before.due)
    yield processed("stale_imports", "entity", sum(result["entities"] for result in results))
    yield processed("stale_imports", "tracker", sum(result["trackers"] for result in results))

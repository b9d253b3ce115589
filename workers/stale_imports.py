"""Give up bulk imports that nothing has touched for a day (batch 65).

Runs every four hours.  A run handles all stale imports, then all stale entities with their trackers; oldest first, in
pages, for at most ten minutes.  A record that raises an error is skipped, and does not block other records, neither now
nor in four hours.

Only unfinished records become *timeout*: each change is one statement that repeats the whole condition, so records that
changed in the meantime stay unchanged.  Rows that another transaction has locked are about to change, and are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import structlog

from forgekeeper import Changes, Record, Subject, batch
from models import STALE_AFTER, BulkImport, BulkImportEntity, BulkImportTracker, is_unfinished

PAGE_SIZE = 100
MAX_RUNTIME = timedelta(minutes=10)
UNTOUCHED_REASON = "it had not been updated for a day"
UNDO_HINT = "only a status was changed: SQL with the ids in the audit restores it, as long as the audit is kept"

TRACKER_IS_UNFINISHED = "status in (0, 1, 3)"
"""Condition of the trackers that are given up with their entity."""

# An import has failures if one of its entities has failures, as in the forge.  One query reads them for a whole page.
TIME_OUT_IMPORTS = """
    with changed as (
        update bulk_imports set status = 3, updated_at = %(now)s,
            has_failures = has_failures or id = any(array(
                select bulk_import_id from bulk_import_entities where bulk_import_id = any(%(ids)s) and has_failures
            ))
        where id = any(array(
            select id from bulk_imports
            where id = any(%(ids)s) and {due}
            order by id
            for update skip locked
        )) and {due}
        returning id, user_id
    ){recorded}
    select id from changed
"""
# The trackers are locked in the order of their ids before any is changed, to avoid a deadlock with an importer that
# changes several.  They are counted for all entities at once: a count per entity would read the whole page each time.
TIME_OUT_ENTITIES = f"""
    with claimed as materialized (
        select id from bulk_import_entities
        where id = any(%(ids)s) and {{due}}
        order by id
        for update skip locked
    ), unfinished as materialized (
        select id from bulk_import_trackers
        where bulk_import_entity_id = any(array(select id from claimed)) and {TRACKER_IS_UNFINISHED}
        order by id
        for update
    ), timed_out as (
        update bulk_import_trackers set status = 4, updated_at = %(now)s
        where id = any(array(select id from unfinished)) and {TRACKER_IS_UNFINISHED}
        returning bulk_import_entity_id
    ), counted as materialized (
        select bulk_import_entity_id, count(*) as trackers from timed_out group by bulk_import_entity_id
    ), changed as (
        update bulk_import_entities set status = 3, updated_at = %(now)s
        where id = any(array(select id from claimed)) and {{due}}
        returning id, bulk_import_id, source_type, source_full_path, destination_name, destination_namespace,
            coalesce((
                select trackers from counted where bulk_import_entity_id = bulk_import_entities.id
            ), 0) as trackers
    ){{recorded}}
    select * from changed
"""
COMMON_OPTIONS: dict[str, Any] = {
    "older_than": STALE_AFTER,
    "chunk": PAGE_SIZE,
    "objective": timedelta(hours=8),
    "verb": "given up",
}
ENTITY_TYPES = {0: "group_entity", 1: "project_entity"}
"""Names of the forge's numbers."""

log = structlog.get_logger(__name__)


@dataclass
class StaleImportsResult:
    """The result of a run; it grows with each page."""

    imports: int = 0
    entities: int = 0
    trackers: int = 0
    skipped: int = 0
    failed: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


# The two log lines of the document, with its level, written after the commit.


def _log_stale_import(row: tuple[Any, ...]) -> dict[str, int]:
    log.error("BulkImport stale", bulk_import_id=row[0])
    return {}


def _log_stale_entity(row: tuple[Any, ...]) -> dict[str, int]:
    log.error(
        "BulkImports::Entity stale",
        bulk_import_entity_id=row[0],
        bulk_import_id=row[1],
        bulk_import_entity_type=ENTITY_TYPES.get(row[2], row[2]),
        source_full_path=row[3],
        destination_name=row[4],
        destination_namespace=row[5],
    )
    return {"trackers": row[6]}


def find_stale_imports() -> Changes[BulkImport]:
    """Return the stale imports."""
    return Changes(
        BulkImport,
        is_unfinished(BulkImport),
        since=BulkImport.updated_at,
        counted="imports",
        statement=TIME_OUT_IMPORTS,
        each=_log_stale_import,
        # The forge mails the user of an import when it ends: its mailer reads the notices.
        notice={"user_id": "user_id"},
        called=Subject(
            "import",
            "ID",
            "bulk_import",
            gone="was given up",
            done="given up",
            because=UNTOUCHED_REASON,
            undone=UNDO_HINT,
        ),
        **COMMON_OPTIONS,
    )


def find_stale_entities() -> Changes[BulkImportEntity]:
    """Return the stale entities, which are given up with their trackers."""
    gone = "was given up with its trackers"
    return Changes(
        BulkImportEntity,
        is_unfinished(BulkImportEntity),
        since=BulkImportEntity.updated_at,
        record="entity",
        counted="entities",
        statement=TIME_OUT_ENTITIES,
        each=_log_stale_entity,
        name=BulkImportEntity.source_full_path,
        audit={name: name for name in ("bulk_import_id", "source_full_path", "trackers")},
        called=Subject(
            "entity", "ID", "entity", gone=gone, done="given up", because=UNTOUCHED_REASON, undone=UNDO_HINT
        ),
        **COMMON_OPTIONS,
    )


@batch(
    document=65,
    cron="0 */4 * * *",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=12),
    team="log-monitoring",
    outcome=StaleImportsResult,
    tables=[BulkImportTracker],
    more_records=[
        Record(
            "bulk_import_or_entity",
            examined=("imports", "entities", "skipped", "failed"),
            # The outcome's `failed`, which the document names, counts them.
            errors={"state_transition": ("failed",)},
        ),
        Record("tracker", processed=("trackers",)),
    ],
    collector="imports",
)
def stale_imports(now: datetime) -> list[Changes[Any]]:
    """Give up bulk imports that nothing has touched for a day."""
    return [find_stale_imports(), find_stale_entities()]

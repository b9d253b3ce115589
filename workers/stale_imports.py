"""Give up bulk imports that nothing has touched for a day (batch 65).

Runs every four hours.  First all stale imports, then all stale entities, each with its
trackers; oldest first, in pages, for at most ten minutes.  A record that raises is passed
over: it does not stand in the way of the others, now or in four hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

import structlog

from forgekeeper.batches import Record, batch
from forgekeeper.database import backlog
from forgekeeper.database.backlog import Backlog
from forgekeeper.runs.run import Run
from models import BulkImport, BulkImportEntity, BulkImportTracker
from models.bulk_imports import START

PAGE_SIZE = 100
MAX_RUNTIME = timedelta(minutes=10)

Kind = type[BulkImport] | type[BulkImportEntity]
log = structlog.get_logger(__name__)


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
    steps=["timed_out"],
)
def stale_imports(run: Run[Outcome]) -> None:
    """Give up bulk imports that nothing has touched for a day."""
    kinds: tuple[Kind, ...] = (BulkImport, BulkImportEntity)
    if not all(_sweep(kind, run) for kind in kinds):
        run.outcome.stopped = "deadline"


def _sweep(kind: Kind, run: Run[Outcome]) -> bool:
    """Time out all of one kind; return False when the budget ended first."""
    position, outcome, instant = START, run.outcome, run.now
    with run.bad_records(kind.RECORD, partial(kind.still_stale, instant), error_kind=None) as bad:
        while page := kind.stale_page(instant, position, limit=PAGE_SIZE, without=bad.keys):
            position, failed, before = page[-1], bad.failed, outcome.imports + outcome.entities
            try:
                bad.each(partial(_clean_up, kind, outcome, instant), [record.id for record in page])
            finally:
                outcome.failed += bad.failed - failed
            done = outcome.imports + outcome.entities - before
            outcome.skipped += len(page) - done - (bad.failed - failed)
            run.step("timed_out")
            if run.deadline.passed(done):
                return False
        return True


def _clean_up(kind: Kind, outcome: Outcome, instant: datetime, ids: Sequence[int]) -> None:
    """Time out those records, and say so of each."""
    timed_out = kind.cleanup_stale(ids, instant)
    if kind is BulkImport:
        outcome.imports += len(timed_out)
    else:
        outcome.entities += len(timed_out)
    outcome.trackers += sum(record.trackers for record in timed_out)
    for record in timed_out:
        # The document's two lines, at its level; they come after the commit.
        log.error(record.message, **record.facts)


@stale_imports.backlog("bulk_import")
def stale(now: datetime) -> Backlog:
    """Count the stale imports."""
    return backlog.bulk_imports(now)


@stale_imports.backlog("entity")
def stale_entities(now: datetime) -> Backlog:
    """Count the stale entities."""
    return backlog.bulk_import_entities(now)

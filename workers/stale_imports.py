"""Give up bulk imports that nothing has touched for a day (batch 65).

Runs every four hours.  First all stale imports, then all stale entities, each with its
trackers; oldest first, in pages, for at most ten minutes.  A record that raises is logged
and passed over: it does not stand in the way of the others, now or in four hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import peewee as pw
import structlog

from models import BulkImport, BulkImportEntity, now, reachable
from models.bulk_imports import START, TimedOut
from workers.attempt import Attempt
from workers.deadline import Deadline
from workers.declaring import batch
from workers.failpoints import failpoint

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


@batch(document=65, outcome=Outcome)
def stale_imports(attempt: Attempt) -> None:
    """Run the batch for the message's row."""
    run(attempt.outcome, attempt.deadline(MAX_RUNTIME))


def run(outcome: Outcome, deadline: Deadline) -> None:
    """Time out the stale imports, then the stale entities with their trackers."""
    instant = now()
    kinds: tuple[Kind, ...] = (BulkImport, BulkImportEntity)
    if not all(_sweep(kind, instant, outcome, deadline) for kind in kinds):
        outcome.stopped = "deadline"


def _sweep(kind: Kind, instant: datetime, outcome: Outcome, deadline: Deadline) -> bool:
    """Time out all of one kind; return False when the budget ended first."""
    position = START
    while page := kind.stale_page(instant, position, limit=PAGE_SIZE):
        position = page[-1]
        timed_out, failed = _clean_up(kind, [record.id for record in page], instant, deadline)
        if kind is BulkImport:
            outcome.imports += len(timed_out)
        else:
            outcome.entities += len(timed_out)
        outcome.trackers += sum(record.trackers for record in timed_out)
        outcome.failed += failed
        outcome.skipped += len(page) - len(timed_out) - failed
        failpoint("stale_imports.timed_out")
        for record in timed_out:
            # The document's two lines, at its level; they come after the commit.
            log.error(record.message, **record.facts)
        if deadline.passed(len(timed_out)):
            return False
    return True


def _clean_up(kind: Kind, ids: list[int], instant: datetime, deadline: Deadline) -> tuple[list[TimedOut], int]:
    """Time out those records; return what was timed out, and how many raised."""
    try:
        return list(kind.cleanup_stale(ids, instant)), 0
    except pw.PeeweeException:
        if not reachable():
            raise
        if len(ids) == 1:
            log.exception("record failed", record=kind.RECORD, id=ids[0])
            return [], 1
    # One of them is bad and took the page with it: each on its own then.
    parts = [_clean_up(kind, [record], instant, deadline) for record in ids if not deadline.passed()]
    return [record for part, _ in parts for record in part], sum(failed for _, failed in parts)

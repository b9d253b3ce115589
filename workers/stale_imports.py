"""Give up bulk imports that nothing has touched for a day (batch 65).

Runs every four hours.  First all stale imports, then all stale entities, each with its
trackers; oldest first, in pages, for at most ten minutes.  A record that raises is logged
and passed over: it does not stand in the way of the others, now or in four hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import dramatiq
import peewee as pw
import structlog

from models import BulkImport, BulkImportEntity, now, reachable
from models.bulk_imports import START, TimedOut
from workers.attempt import current
from workers.broker import broker
from workers.deadline import Deadline
from workers.failpoints import failpoint

PAGE_SIZE = 100
MAX_RUNTIME = timedelta(minutes=10)

Kind = type[BulkImport] | type[BulkImportEntity]
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    imports: int = 0
    entities: int = 0
    trackers: int = 0
    skipped: int = 0
    failed: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@dataclass
class Sweep:
    """What has become of one kind of stale records so far."""

    timed_out: int = 0
    trackers: int = 0
    skipped: int = 0
    failed: int = 0
    drained: bool = False


@dramatiq.actor(broker=broker, queue_name="cron", document=65, time_limit=1_800_000)
def stale_imports() -> None:
    """Run the batch for the message's row."""
    attempt = current()
    attempt.outcome = run(attempt.deadline(MAX_RUNTIME))


def run(deadline: Deadline) -> Outcome:
    """Time out the stale imports, then the stale entities with their trackers."""
    instant = now()
    imports = _sweep(BulkImport, instant, deadline)
    entities = _sweep(BulkImportEntity, instant, deadline) if imports.drained else Sweep()
    return Outcome(
        imports.timed_out,
        entities.timed_out,
        entities.trackers,
        imports.skipped + entities.skipped,
        imports.failed + entities.failed,
        "drained" if entities.drained else "deadline",
    )


def _sweep(kind: Kind, instant: datetime, deadline: Deadline) -> Sweep:
    sweep, position = Sweep(), START
    while page := kind.stale_page(instant, position, limit=PAGE_SIZE):
        position = page[-1]
        timed_out, failed = _clean_up(kind, [record.id for record in page], instant, deadline)
        failpoint("stale_imports.timed_out")
        for record in timed_out:
            # The document's two lines, at its level; they come after the commit.
            log.error(record.message, **record.facts)
        sweep.timed_out += len(timed_out)
        sweep.trackers += sum(record.trackers for record in timed_out)
        sweep.failed += failed
        sweep.skipped += len(page) - len(timed_out) - failed
        if deadline.passed(len(timed_out)):
            return sweep
    sweep.drained = True
    return sweep


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

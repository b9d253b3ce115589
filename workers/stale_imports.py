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

from models import BulkImport, BulkImportEntity
from forgekeeper.database import now
from models.bulk_imports import START
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.deadline import Deadline
from forgekeeper.declaring import batch
from forgekeeper.failpoints import failpoint

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
    position, batch = START, stale_imports.actor_name
    still = partial(kind.still_stale, instant)
    # They are counted as the outcome's `failed`, which the document names.
    with BadRecords(batch, kind.RECORD, deadline, still, error_kind=None) as bad:
        while page := kind.stale_page(instant, position, limit=PAGE_SIZE, without=bad.keys):
            position, failed, before = page[-1], bad.failed, outcome.imports + outcome.entities
            try:
                bad.each(partial(_clean_up, kind, outcome, instant), [record.id for record in page])
            finally:
                outcome.failed += bad.failed - failed
            done = outcome.imports + outcome.entities - before
            outcome.skipped += len(page) - done - (bad.failed - failed)
            failpoint("stale_imports.timed_out")
            if deadline.passed(done):
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

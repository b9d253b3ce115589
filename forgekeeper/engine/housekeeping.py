"""Removal of old records: forgekeeper's own records, and the rows that batches are done with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import structlog

from forgekeeper.api.answers import Rows
from forgekeeper.api.batches import Record, all_declared
from forgekeeper.api.housekeeping import Housekeeping
from forgekeeper.api.shown import Look, Part
from forgekeeper.audit import upkeep
from forgekeeper.engine import rows
from forgekeeper.engine.run import Run
from forgekeeper.guards.preconditions import fits
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.notices import Notice
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.totals import RunTotal
from forgekeeper.platform.database.exclusions import Exclusion
from forgekeeper.platform.database.sessions import writing
from forgekeeper.sources.settled import SettledUpload

RECORDS = (
    Record("ref_deletion", processed=("ref_deletions",), errors={"database": ()}),
    Record("job_run", processed=("runs",), errors={"database": ()}),
    Record("process", processed=("processes",)),
    Record("settled_upload", processed=("uploads",)),
    Record("run_total", processed=("run_totals",)),
    Record("audit_month", processed=("audit_months",)),
    Record("exclusion", processed=("exclusions",)),
)

log = structlog.get_logger(__name__)


@dataclass
class HousekeepingOutcome:
    """Numbers of removed records by kind; they grow with each chunk."""

    ref_deletions: int = 0
    runs: int = 0
    processes: int = 0
    uploads: int = 0
    stopped: Literal["drained", "deadline"] = "drained"
    run_totals: int = 0
    audit_months: int = 0
    exclusions: int = 0


def remove_old_records(run: Run[Any], keep: Housekeeping) -> str | None:
    """Remove the old records of each kind; return why the run ended before, None if none is left."""
    return next((stopped for stopped in _remove_each_kind(run, keep) if stopped is not None), None)


def _remove_each_kind(run: Run[Any], keep: Housekeeping) -> Iterator[str | None]:
    """Remove one kind of records after the other; yield for each why the run has to end."""
    now, remove = run.now, partial(_remove, run, keep.chunk)
    audit_keep = timedelta(days=run.settings.audit_keep)
    yield remove(lambda _: _keep_audit_up(now, ahead=keep.audit_ahead, keep=audit_keep), counted="audit_months")
    yield remove(lambda _: quarantine.forget_old(now - keep.quarantine))
    for one in find_old_rows(keep, now):
        yield rows.delete(run, one.bind(run.declared.batch.name, now))
    uploads, totals = now - keep.settled_uploads, now - keep.run_totals
    yield remove(
        lambda limit: SettledUpload.delete_old(uploads, limit=limit), record="settled_upload", counted="uploads"
    )
    yield remove(lambda limit: RunTotal.delete_old(totals, limit=limit), record="run_total", counted="run_totals")


def _remove(
    run: Run[Any], chunk: int, remove: Callable[[int], int], *, record: str | None = None, counted: str | None = None
) -> str | None:
    """Call *remove* with the size of a chunk, at least once; return why the run has to end before the last chunk.

    It returns how many records it has removed.  The audit gets that number in the same transaction, under the name
    *record*.  *counted* is the field of the result.
    """
    count = chunk
    while count == chunk:
        with writing():
            count = remove(chunk)
            if count and record is not None:
                run.audit.done(record, ids=(), count=count)
        if counted is not None:
            run.add(counted, count)
        run.step("removed")
        if run.deadline.passed(count) and count == chunk:
            return "deadline"
    return None


def find_old_rows(keep: Housekeeping, now: datetime) -> Iterator[Rows[Any]]:
    """Yield the rows to remove: rows that batches have declared, then forgekeeper's own."""
    kinds = [
        # A batch whose tables are wrong does not stop the others.
        *(old(now) for one in all_declared() if one.old and fits(one.batch) for old in one.old),
        Rows(JobRun, JobRun.is_superseded(), since=JobRun.finished_at, older_than=keep.runs, counted="runs"),
        Rows(Process, since=Process.silent_from, older_than=keep.processes, counted="processes"),
        Rows(Exclusion, since=Exclusion.until, older_than=keep.exclusions, counted="exclusions"),
        Rows(Notice, since=Notice.at, older_than=keep.notices, counted="notices"),
    ]
    return (replace(kind, chunk=keep.chunk, objective=None) for kind in kinds)


def _keep_audit_up(now: datetime, *, ahead: timedelta, keep: timedelta) -> int:
    """Create the audit's next partitions, drop the old ones, and return how many; a locked audit waits an hour."""
    months = upkeep.keep_up(until=now + ahead, horizon=now - keep)
    if (kept := upkeep.kept()) > keep.days:
        log.warning("audit kept longer than set: run `forgekeeper migrate` with that setting", days=kept)
    if months:
        log.info("months of the audit removed", months=months)
    return months


def preview_old_records(keep: Housekeeping, look: Look) -> Iterator[Part]:
    """Count the old records, kind by kind."""
    for one in find_old_rows(keep, look.now):
        yield from rows.parts_of(one, look.within_share(0.5))
    uploads = SettledUpload.old(look.now - keep.settled_uploads)
    yield look.count(look.part("settled_upload"), uploads, after=keep.settled_uploads)

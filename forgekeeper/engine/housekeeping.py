"""Removal of old records: forgekeeper's own records, and the rows that batches are done with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import structlog

from forgekeeper.api.answers import Rows
from forgekeeper.api.batches import all_declared
from forgekeeper.api.housekeeping import Housekeeping
from forgekeeper.api.inspection import PreviewContext, PreviewPart
from forgekeeper.api.records import Record
from forgekeeper.audit import partitions
from forgekeeper.engine import rows
from forgekeeper.engine.run import Run
from forgekeeper.guards.preconditions import fits_relations
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.notices import Notice
from forgekeeper.platform.database.exclusions import Exclusion
from forgekeeper.platform.database.sessions import write_transaction
from forgekeeper.sources.settled import SettledUpload

HOUSEKEEPING_RECORDS = (
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


def remove_old_records(run: Run[Any], retention: Housekeeping) -> str | None:
    """Remove the old records of each kind; return why the run ended before, None if none is left."""
    return next((stopped for stopped in _remove_each_kind(run, retention) if stopped is not None), None)


def _remove_each_kind(run: Run[Any], retention: Housekeeping) -> Iterator[str | None]:
    """Remove one kind of records after the other; yield for each why the run has to end."""
    now, remove = run.now, partial(_remove_in_chunks, run, retention.chunk)
    audit_keep = timedelta(days=run.settings.audit_keep)
    yield remove(
        lambda _: _maintain_audit_partitions(now, ahead=retention.audit_ahead, keep=audit_keep), counted="audit_months"
    )
    yield remove(lambda _: quarantine.delete_old(now - retention.quarantine))
    for one in find_old_rows(retention, now):
        yield rows.delete_due(run, one.bind(run.declared.batch.name, now))
    uploads, totals = now - retention.settled_uploads, now - retention.run_totals
    yield remove(
        lambda limit: SettledUpload.delete_old(uploads, limit=limit), record="settled_upload", counted="uploads"
    )
    yield remove(lambda limit: RunTotal.delete_old(totals, limit=limit), record="run_total", counted="run_totals")


def _remove_in_chunks(
    run: Run[Any], chunk: int, remove: Callable[[int], int], *, record: str | None = None, counted: str | None = None
) -> str | None:
    """Call *remove* with the size of a chunk, at least once; return why the run has to end before the last chunk.

    It returns how many records it has removed.  The audit gets that number in the same transaction, under the name
    *record*.  *counted* is the field of the result.
    """
    count = chunk
    while count == chunk:
        with write_transaction():
            count = remove(chunk)
            if count and record is not None:
                run.audit.record_deleted(record, ids=(), count=count)
        if counted is not None:
            run.add_to_result(counted, count)
        run.reach_failpoint("removed")
        if run.deadline.has_passed(count) and count == chunk:
            return "deadline"
    return None


def find_old_rows(retention: Housekeeping, now: datetime) -> Iterator[Rows[Any]]:
    """Yield the rows to remove: rows that batches have declared, then forgekeeper's own."""
    kinds = [
        # A batch whose tables are wrong does not stop the others.
        *(
            old(now)
            for one in all_declared()
            if one.old_row_functions and fits_relations(one.batch)
            for old in one.old_row_functions
        ),
        Rows(JobRun, JobRun.is_superseded(), since=JobRun.finished_at, older_than=retention.runs, counted="runs"),
        Rows(Process, since=Process.silent_from, older_than=retention.processes, counted="processes"),
        Rows(Exclusion, since=Exclusion.until, older_than=retention.exclusions, counted="exclusions"),
        Rows(Notice, since=Notice.at, older_than=retention.notices, counted="notices"),
    ]
    return (replace(kind, chunk=retention.chunk, objective=None) for kind in kinds)


def _maintain_audit_partitions(now: datetime, *, ahead: timedelta, keep: timedelta) -> int:
    """Create the audit's next partitions, drop the old ones, and return how many; a locked audit waits an hour."""
    months = partitions.maintain_partitions(until=now + ahead, horizon=now - keep)
    if (kept := partitions.read_retention_days()) > keep.days:
        log.warning(
            "audit kept longer than FORGEKEEPER_AUDIT_KEEP, run `forgekeeper migrate` to apply the setting", days=kept
        )
    if months:
        log.info("months of the audit deleted", months=months)
    return months


def preview_old_records(retention: Housekeeping, look: PreviewContext) -> Iterator[PreviewPart]:
    """Count the old records, kind by kind."""
    for one in find_old_rows(retention, look.now):
        yield from rows.preview_rows(one, look.within_share(0.5))
    uploads = SettledUpload.select_old(look.now - retention.settled_uploads)
    yield look.count_rows(look.begin_part("settled_upload"), uploads, after=retention.settled_uploads)

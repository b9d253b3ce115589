"""Remove old records: forgekeeper's own, and those that batches have declared.

Runs hourly, in bounded chunks: what batches are done with after as long as they say, closed runs after thirty days (the
newest of each batch stays), processes that expired a day ago, exclusions that ended thirty days ago, what has become of
uploads thirty days ago, what runs have deleted sixty days ago (the last hundred runs of each batch stay), what lies in
quarantine and has not failed for a week, and whole months of the audit after AUDIT_KEEP.  What it removes is in the
audit itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

import structlog

from forgekeeper import Record, Rows, batch
from forgekeeper.api.answers import Removal
from forgekeeper.api.batches import all_declared
from forgekeeper.api.shown import Look, Part
from forgekeeper.audit import upkeep
from forgekeeper.engine.rows import parts_of
from forgekeeper.engine.work import settings
from forgekeeper.guards.preconditions import fits
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.totals import RunTotal
from forgekeeper.platform.database.exclusions import Exclusion
from forgekeeper.sources.settled import SettledUpload

CHUNK = 1_000
MAX_RUNTIME = timedelta(minutes=5)
KEEP_RUNS = timedelta(days=30)
KEEP_FAILURES = timedelta(days=7)
"""From their last failure on: in quarantine each is tried again after a day at most, or waits for a person."""
KEEP_PROCESSES = timedelta(days=1)
KEEP_UPLOADS = timedelta(days=30)
"""A Redis that comes back must not be older: what it says of uploads could not be checked."""

KEEP_EXCLUSIONS = timedelta(days=30)
"""From their end on, for anyone who asks why something is there."""
KEEP_TOTALS = timedelta(days=60)
AHEAD = timedelta(days=365)
"""How far ahead the audit has partitions."""

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """How many records of each kind were removed; it grows with each chunk."""

    ref_deletions: int = 0
    runs: int = 0
    processes: int = 0
    uploads: int = 0
    stopped: Literal["drained", "deadline"] = "drained"
    run_totals: int = 0
    audit_months: int = 0
    exclusions: int = 0


@batch(
    cron="0 * * * *",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=7),
    outcome=Outcome,
    tables=[JobRun],
    records=[
        Record("ref_deletion", processed=("ref_deletions",), errors={"database": ()}),
        Record("job_run", processed=("runs",), errors={"database": ()}),
        Record("process", processed=("processes",)),
        Record("settled_upload", processed=("uploads",)),
        Record("run_total", processed=("run_totals",)),
        Record("audit_month", processed=("audit_months",)),
        Record("exclusion", processed=("exclusions",)),
    ],
)
def prune(now: datetime) -> Iterator[Rows[Any] | Removal]:
    """Remove forgekeeper's own old records."""
    yield Removal(None, lambda _limit: _keep_up(now), counted="audit_months")
    yield Removal(None, lambda _limit: quarantine.forget_old(now - KEEP_FAILURES))
    yield from old_rows(now)
    uploads, totals = now - KEEP_UPLOADS, now - KEEP_TOTALS
    yield Removal("settled_upload", lambda limit: SettledUpload.delete_old(uploads, limit=limit), counted="uploads")
    yield Removal("run_total", lambda limit: RunTotal.delete_old(totals, limit=limit), counted="run_totals")


def old_rows(now: datetime) -> Iterator[Rows[Any]]:
    """Yield the rows that are old: what batches have declared, closed runs, what has ended or expired."""
    kinds = [
        # What is wrong with the tables of one batch keeps back no other's.
        *(old(now) for one in all_declared() if one.old and fits(one.batch) for old in one.old),
        Rows(JobRun, JobRun.is_superseded(), since=JobRun.finished_at, older_than=KEEP_RUNS, counted="runs"),
        Rows(Process, since=Process.silent_from, older_than=KEEP_PROCESSES, counted="processes"),
        Rows(Exclusion, since=Exclusion.until, older_than=KEEP_EXCLUSIONS, counted="exclusions"),
    ]
    return (replace(kind, chunk=CHUNK, objective=None) for kind in kinds)


def _keep_up(now: datetime) -> int:
    """Create the audit's next partitions and drop the old ones; where it is locked, try again in an hour."""
    keep = settings().audit_keep
    months = upkeep.keep_up(until=now + AHEAD, horizon=now - timedelta(days=keep))
    if (kept := upkeep.kept()) > keep:
        log.warning("audit kept longer than set: run `forgekeeper migrate` with that setting", days=kept)
    if months:
        log.info("months of the audit removed", months=months)
    return months


@prune.preview
def previewed(look: Look) -> Iterator[Part]:
    """Count what is old, kind by kind."""
    for one in old_rows(look.now):
        yield from parts_of(one, look.within_share(0.5))
    yield look.count(look.part("settled_upload"), SettledUpload.old(look.now - KEEP_UPLOADS), after=KEEP_UPLOADS)

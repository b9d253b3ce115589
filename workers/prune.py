"""Remove old records: forgekeeper's own, and those that batches have declared.

Runs hourly, in bounded chunks: what batches are done with after as long as they say, closed
runs after thirty days (the newest of each batch stays), dead letters past their time to live,
processes that fell silent a day ago, what is known of bad records that nobody has come
across for thirty days, what has become of uploads thirty days ago, what runs have deleted
sixty days ago (the last hundred runs of each batch stay), and whole months of the audit
after AUDIT_KEEP.  What it removes is in the audit itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

import structlog

from forgekeeper.audit import upkeep
from forgekeeper.batches import OldRecords, Record, all_declared, batch, queues
from forgekeeper.database import chunks, database
from forgekeeper.database.misreading import misread
from forgekeeper.database.survey import Rows, Selected
from forgekeeper.preview import Look, Part
from forgekeeper.process.rows import Process
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.passed_over import PassedOver
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.runs.run import Run
from forgekeeper.runs.totals import RunTotal
from forgekeeper.storage.settled import SettledUpload
from metrics.redaction import describe

if TYPE_CHECKING:
    from forgekeeper.delivery.enqueue_unique import OldDead

CHUNK = 1_000
MAX_RUNTIME = timedelta(minutes=5)
KEEP_RUNS = timedelta(days=30)
KEEP_BAD_RECORDS = timedelta(days=30)
"""From their last failure on: they are tried again each day at least."""
KEEP_FAILED_CHILDREN = timedelta(days=7)
"""From their last failure on: by then they were tried for hours, and are dead letters."""
KEEP_PROCESSES = timedelta(days=1)
KEEP_UPLOADS = timedelta(days=30)
"""No Redis may come back that is older: what it says of uploads could not be told from the truth."""

KEEP_TOTALS = timedelta(days=60)
AHEAD = timedelta(days=365)
"""For so long there are partitions of the audit."""

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """How many records of each kind were removed; it grows with each chunk."""

    ref_deletions: int = 0
    runs: int = 0
    dead_letters: int = 0
    processes: int = 0
    uploads: int = 0
    stopped: Literal["drained", "deadline"] = "drained"
    run_totals: int = 0
    audit_months: int = 0


def kinds() -> list[OldRecords]:
    """Name the rows of which a bad one is passed over: what batches have declared, and closed runs."""
    declared = [kind for one in all_declared() for kind in one.old]
    return [*declared, OldRecords("job_run", KEEP_RUNS, JobRun.closed_before)]


@batch(
    cron="0 * * * *",
    cron_sentence="When forgekeeper's own old records are removed.",
    pace_sentence="Records removed per second at most; unset: no limit.",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=7),
    outcome=Outcome,
    tables=[JobRun],
    records=[
        Record("ref_deletion", processed=("ref_deletions",), errors={"database": ()}),
        Record("job_run", processed=("runs",), errors={"database": ()}),
        Record("dead_letter", processed=("dead_letters",)),
        Record("process", processed=("processes",)),
        Record("settled_upload", processed=("uploads",)),
        Record("run_total", processed=("run_totals",)),
        Record("audit_month", processed=("audit_months",)),
    ],
    steps=["removed"],
)
def prune(run: Run[Outcome]) -> None:
    """Remove forgekeeper's own old records."""
    instant = run.now
    for sentence in misread([kind.older(instant).model for kind in kinds()]):
        raise Blocked("schema", sentence)
    _keep_up(run)
    PassedOver.forget_old(instant - KEEP_BAD_RECORDS)
    Quarantined.forget_old(instant - KEEP_FAILED_CHILDREN)
    silent = Process.silent_before(instant - KEEP_PROCESSES)
    removals = [
        *(partial(_rows, run, kind) for kind in kinds()),
        *(partial(_others, run, "dead_letter", partial(_forget_dead, queue)) for queue in queues()),
        partial(_others, run, "process", partial(chunks.delete, silent, gone=_audited(run, "process")), counted=False),
        partial(_others, run, "settled_upload", partial(SettledUpload.delete_old, instant - KEEP_UPLOADS)),
        partial(_others, run, "run_total", partial(RunTotal.delete_old, instant - KEEP_TOTALS)),
    ]
    if not all(remove() for remove in removals):
        run.outcome.stopped = "deadline"


def _keep_up(run: Run[Outcome]) -> None:
    """Make the audit's partitions to come, and drop those that are past; where somebody is in the way, in an hour."""
    try:
        upkeep.make_partitions(run.now + AHEAD)
        run.outcome.audit_months = upkeep.drop_partitions(run.now - timedelta(days=run.settings.audit_keep))
    except upkeep.Busy as busy:
        log.warning("audit not kept up, it is locked; tried again in an hour", error=describe(busy))
    if (kept := upkeep.kept()) > run.settings.audit_keep:
        log.warning("audit kept longer than set: run `forgekeeper migrate` with that setting", days=kept)
    if run.outcome.audit_months:
        log.info("months of the audit removed", months=run.outcome.audit_months)


def _forget_dead(queue: str, *, limit: int) -> int:
    # Whoever only looks at batches needs no broker, which takes a tenth of a second to import.
    from forgekeeper.delivery.enqueue_unique import forget_dead
    from forgekeeper.process.broker import broker

    return forget_dead(broker, queue, limit=limit)


def _old_dead(queue: str, *, limit: int) -> OldDead:
    from forgekeeper.delivery.enqueue_unique import old_dead
    from forgekeeper.process.broker import broker

    return old_dead(broker, queue, limit=limit)


def _audited(run: Run[Outcome], record: str) -> Callable[[Sequence[int]], None] | None:
    """Return what says in the audit which rows are gone; None where that is off."""
    return (lambda keys: run.audit.done(record, ids=keys)) if run.audit.on else None


@prune.preview
def foreseen(look: Look) -> Iterator[Part]:
    """Count what is old, kind by kind."""
    instant = look.now
    old: list[tuple[str, timedelta, Rows | Selected]] = [
        *((kind.record, kind.keep, Selected(kind.older(instant - kind.keep))) for kind in kinds()),
        ("process", KEEP_PROCESSES, Selected(Process.silent_before(instant - KEEP_PROCESSES))),
        ("settled_upload", KEEP_UPLOADS, SettledUpload.old(instant - KEEP_UPLOADS)),
    ]
    for number, (record, keep, rows) in enumerate(old):
        yield look.count(look.part(record), rows, after=keep, share=1 / (len(old) - number))
    part = look.part("dead_letter")
    for queue in queues():
        found = _old_dead(queue, limit=look.size)
        for key, since in found.oldest:
            part.one(key, queue, since, size=look.size)
        part.records += found.letters - len(found.oldest)
    part.newest = None
    yield part


def _rows(run: Run[Outcome], kind: OldRecords) -> bool:
    """Remove the rows of a kind, but bad ones; return False when the budget ended first."""
    older = kind.older(run.now - kind.keep)
    error_kind = "database" if kind.record in FIELDS else None
    then, gone = partial(_count, run, kind.record), _audited(run, kind.record)
    with run.bad_records(kind.record, older, error_kind=error_kind) as bad:
        return _in_chunks(run, lambda: bad.delete(older, limit=CHUNK, then=then, gone=gone))


def _others(run: Run[Outcome], record: str, remove: Callable[..., int], *, counted: bool = True) -> bool:
    """Remove what one record cannot spoil; return False when the budget ended first.

    In the audit is how many went, unless those are not *counted*: then *remove* has said it there itself.
    """

    def chunk() -> int:
        with database.atomic():
            count = remove(limit=CHUNK)
            if count and counted:
                run.audit.done(record, ids=(), count=count)
        _count(run, record, count)
        return count

    return _in_chunks(run, chunk)


def _in_chunks(run: Run[Outcome], remove: Callable[[], int]) -> bool:
    """Remove one kind; a budget that has ended leaves each its first chunk, a stop leaves none."""
    count = CHUNK
    if run.deadline.halted():
        return False
    while count == CHUNK:
        count = remove()
        run.step("removed")
        if run.deadline.passed(count) and count == CHUNK:
            return False
    return True


def _count(run: Run[Outcome], record: str, count: int) -> None:
    """Count what has gone; what the outcome has no field for is an operator's own, and said in the log."""
    for name in FIELDS.get(record, ()):
        setattr(run.outcome, name, getattr(run.outcome, name) + count)
    if record not in FIELDS and count:
        log.info("old records removed", record=record, records=count)


FIELDS = {record.name: record.processed for record in prune.records}
"""In which fields of the outcome a kind is counted."""

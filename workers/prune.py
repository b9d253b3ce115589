"""Remove forgekeeper's own old records.

Runs hourly, in bounded chunks: processed ref deletions after a day, closed runs after
thirty days (the newest of each batch stays), dead letters past their time to live,
processes that fell silent a day ago, what is known of bad records that nobody has come
across for thirty days, and what has become of uploads thirty days ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from forgekeeper.batches import Record, batch, queues
from forgekeeper.delivery.enqueue_unique import forget_dead
from forgekeeper.process.broker import broker
from forgekeeper.process.rows import Process
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.passed_over import PassedOver
from forgekeeper.runs.run import Run
from forgekeeper.storage.settled import SettledUpload
from models import GitRefDeletion

CHUNK = 1_000
MAX_RUNTIME = timedelta(minutes=5)
KEEP_REF_DELETIONS = timedelta(days=1)
KEEP_RUNS = timedelta(days=30)
KEEP_BAD_RECORDS = timedelta(days=30)
"""From their last failure on: they are tried again each day at least."""
KEEP_PROCESSES = timedelta(days=1)
KEEP_UPLOADS = timedelta(days=30)
"""No Redis may come back that is older: what it says of uploads could not be told from the truth."""


@dataclass
class Outcome:
    """How many records of each kind were removed; it grows with each chunk."""

    ref_deletions: int = 0
    runs: int = 0
    dead_letters: int = 0
    processes: int = 0
    uploads: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(
    cron="0 * * * *",
    cron_sentence="When forgekeeper's own old records are removed.",
    pace_sentence="Records removed per second at most; unset: no limit.",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=7),
    outcome=Outcome,
    tables=[GitRefDeletion, JobRun],
    records=[
        Record("ref_deletion", processed=("ref_deletions",), errors={"database": ()}),
        Record("job_run", processed=("runs",), errors={"database": ()}),
        Record("dead_letter", processed=("dead_letters",)),
        Record("process", processed=("processes",)),
        Record("settled_upload", processed=("uploads",)),
    ],
    steps=["removed"],
)
def prune(run: Run[Outcome]) -> None:
    """Remove forgekeeper's own old records."""
    outcome, deadline, instant = run.outcome, run.deadline, run.now
    with (
        run.bad_records("ref_deletion", GitRefDeletion.present) as refs,
        run.bad_records("job_run", JobRun.present) as runs,
    ):
        removals: list[Callable[[], int]] = [
            partial(_ref_deletions, outcome, refs, instant - KEEP_REF_DELETIONS),
            partial(_runs, outcome, runs, instant - KEEP_RUNS),
            *(partial(_letters, outcome, queue) for queue in queues()),
            partial(_processes, outcome, instant - KEEP_PROCESSES),
            partial(_uploads, outcome, instant - KEEP_UPLOADS),
        ]
        PassedOver.forget_old(instant - KEEP_BAD_RECORDS)
        for remove in removals:
            count = CHUNK
            while count == CHUNK:
                count = remove()
                run.step("removed")
                if deadline.passed(count) and count == CHUNK:
                    outcome.stopped = "deadline"
                    return


def _ref_deletions(outcome: Outcome, bad: BadRecords, horizon: datetime) -> int:
    """Remove a chunk; return how many were dealt with, bad ones included."""
    before = outcome.ref_deletions + bad.failed

    def remove(only: Sequence[int] | None) -> None:
        outcome.ref_deletions += GitRefDeletion.delete_processed(horizon, limit=CHUNK, only=only, without=bad.keys)

    bad.chunk(remove, partial(GitRefDeletion.next_processed, horizon, limit=CHUNK, without=bad.keys))
    return outcome.ref_deletions + bad.failed - before


def _runs(outcome: Outcome, bad: BadRecords, horizon: datetime) -> int:
    """Remove a chunk; return how many were dealt with, bad ones included."""
    before = outcome.runs + bad.failed

    def remove(only: Sequence[int] | None) -> None:
        outcome.runs += JobRun.delete_closed(horizon, limit=CHUNK, only=only, without=bad.keys)

    bad.chunk(remove, partial(JobRun.next_closed, horizon, limit=CHUNK, without=bad.keys))
    return outcome.runs + bad.failed - before


def _letters(outcome: Outcome, queue: str) -> int:
    count = forget_dead(broker, queue, limit=CHUNK)
    outcome.dead_letters += count
    return count


def _processes(outcome: Outcome, horizon: datetime) -> int:
    count = Process.delete_silent(horizon, limit=CHUNK)
    outcome.processes += count
    return count


def _uploads(outcome: Outcome, horizon: datetime) -> int:
    count = SettledUpload.delete_old(horizon, limit=CHUNK)
    outcome.uploads += count
    return count

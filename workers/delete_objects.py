"""Delete the objects whose artifacts are gone: the outbox of batch 11.

Runs every minute.  It claims rows of the outbox, deletes their objects in bulk, and
removes the rows.  An object that a live artifact still names is left alone.  What fails
comes back later, ten times; then it is dead, and `forgekeeper objects` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

import structlog

from forgekeeper.batches import Record, batch
from forgekeeper.database import backlog, now, probe
from forgekeeper.database.backlog import Backlog
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.run import Run
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from forgekeeper.storage.objects import OUTSIDE, Objects, StoreUnavailable
from forgekeeper.storage.outbox import Claimed, DeletedObject
from models import JobArtifact

CHUNK = 1_000
FIRST_RETRY = timedelta(minutes=1)
MAX_RUNTIME = timedelta(minutes=4)

Stopped = Literal["drained", "deadline", "store_unavailable", "no_store"]

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """What a run comes to; it grows with each chunk.  *remaining* is what is due afterwards."""

    deleted: int = 0
    missing: int = 0
    failed: int = 0
    remaining: int = 0
    stopped: Stopped = "drained"


@batch(
    cron="* * * * *",
    cron_sentence="When the objects of deleted artifacts are deleted.",
    pace_sentence="Objects deleted per second; unset: no limit.",
    queue="objects",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=6),
    outcome=Outcome,
    # The second says what live artifacts name.
    tables=[DeletedObject, JobArtifact],
    deletes_from="artifacts",
    records=[
        Record(
            "deleted_object",
            examined=("deleted", "missing", "failed"),
            processed=("deleted", "missing"),
            errors={"database": (), "object_storage": ("failed",)},
            objective=timedelta(hours=1),
        ),
        Record("dead_object", given_up=True),
    ],
    collector="objects",
    steps=["claimed", "deleted", "forgotten"],
    commands="forgekeeper.cli.objects",
)
def delete_objects(run: Run[Outcome]) -> None:
    """Delete the objects of destroyed artifacts.

    Raises `StoreUnavailable` when the store does not answer, `Blocked` when there is none.
    """
    try:
        with run.bad_records("deleted_object", DeletedObject.present) as bad:
            _end(run.outcome, _work_off(run, bad))
    except StoreUnavailable as error:
        log.error("object store unavailable", location=stores.ARTIFACTS, error=str(error))  # noqa: TRY400, no trace
        _end(run.outcome, "store_unavailable")
        raise
    except Blocked:
        _end(run.outcome, "no_store")
        raise


def _end(outcome: Outcome, stopped: Stopped) -> None:
    outcome.stopped, outcome.remaining = stopped, DeletedObject.due(now()).count()


def _work_off(run: Run[Outcome], bad: BadRecords) -> Literal["drained", "deadline"]:
    store = stores.at(stores.ARTIFACTS, run.settings)
    if store is None:
        raise Blocked("no_store", f"no object store {stores.ARTIFACTS!r} is configured; set FORGEKEEPER_OBJECT_STORES")
    while True:
        # What was claimed is ours for so long; it is counted from before the claim.
        until = time.monotonic() + min(run.deadline.left(), run.settings.object_visibility.total_seconds())
        claimed, more = _claim(bad, run.settings)
        if not more:
            return "drained"
        run.step("claimed")
        _delete(store, claimed, run, until, bad)
        if run.deadline.passed(len(claimed)):
            return "deadline"


def _claim(bad: BadRecords, settings: Settings) -> tuple[list[Claimed], bool]:
    """Claim what is due; return it, and whether there was anything at all."""
    instant, claimed = now(), list[Claimed]()

    def claim(only: Sequence[int] | None) -> int | None:
        rows = DeletedObject.claim_due(
            instant, visibility=settings.object_visibility, limit=CHUNK, only=only, without=bad.keys
        )
        claimed.extend(rows)
        return rows[-1].id if rows else None

    reached = bad.chunk(claim, partial(DeletedObject.next_due, instant, limit=CHUNK, without=bad.keys))
    return claimed, reached is not None


def _delete(store: Objects, claimed: list[Claimed], run: Run[Outcome], until: float, bad: BadRecords) -> None:
    named = JobArtifact.named([row.path for row in claimed])
    for row in claimed:
        if row.path in named:
            log.error("object kept, an artifact names it", path=row.path)
    paths = [row.path for row in claimed if row.path not in named]
    try:
        answers = store.delete(paths, until=until)
    except StoreUnavailable as error:
        _settle(claimed, {path: answer.state for path, answer in error.known.items()}, named, run, bad)
        raise
    run.step("deleted")
    outside = [path for path, answer in answers.items() if OUTSIDE in answer.reason]
    if outside:
        log.error("objects not deleted", reason=OUTSIDE, objects=len(outside), first=outside[0])
    _settle(claimed, {path: answer.state for path, answer in answers.items()}, named, run, bad)


def _settle(
    claimed: list[Claimed], states: dict[str, str], named: set[str], run: Run[Outcome], bad: BadRecords
) -> None:
    """Remove the rows of what is gone, spend an attempt on what failed, give the rest back."""
    outcome, rows = run.outcome, {row.id: row for row in claimed}
    gone = [row.id for row in claimed if row.path in named or states.get(row.path) in ("deleted", "missing")]
    failed = [row.id for row in claimed if row.id not in gone and states.get(row.path) == "failed"]

    def forget(ids: Sequence[int]) -> None:
        DeletedObject.forget([rows[number] for number in ids])
        outcome.deleted += sum(states.get(rows[number].path) == "deleted" for number in ids)
        outcome.missing += sum(states.get(rows[number].path) == "missing" for number in ids)

    def fail(ids: Sequence[int]) -> None:
        died = DeletedObject.fail([rows[number] for number in ids], first_retry=FIRST_RETRY)
        outcome.failed += len(ids)
        if died:
            log.error("objects given up", objects=died)

    bad.each(forget, gone)
    run.step("forgotten")
    bad.each(fail, failed)
    settled = {*gone, *failed}
    left = [row.id for row in claimed if row.id not in settled]
    bad.each(lambda ids: DeletedObject.put_back([rows[number] for number in ids], now()), left)


@delete_objects.backlog("deleted_object")
def due(now: datetime) -> Backlog:
    """Count the objects to delete."""
    return Backlog.of(DeletedObject.due(now).order_by(DeletedObject.pick_up_at), oldest=DeletedObject.pick_up_at)


@delete_objects.given_up("dead_object")
def dead() -> int:
    """Count the objects that were given up."""
    return backlog.count(DeletedObject.dead())


@delete_objects.objects
def known(location: str) -> list[str]:
    """Return where some objects should lie: of live artifacts, and of those that wait to be deleted."""
    if location != stores.ARTIFACTS:
        return []
    outbox = probe.sample("ci_deleted_objects", "id", "concat_ws('/', nullif(store_dir, ''), file)")
    return [*probe.sample("ci_job_artifacts", "id", "file_final_path"), *outbox]

"""Delete the objects whose artifacts are gone: the outbox of batch 11.

Runs every minute.  It claims rows of the outbox, deletes their objects in bulk, and
removes the rows.  An object that a live artifact still names is left alone.  What fails
comes back later, ten times; then it is dead, and `forgekeeper objects` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import structlog

from forgekeeper.storage.outbox import DeletedObject
from models import JobArtifact
from forgekeeper.database import now
from forgekeeper.storage.outbox import Claimed
from forgekeeper.settings import Settings
from forgekeeper.storage.objects import OUTSIDE, Objects, StoreUnavailable
from forgekeeper.storage import stores
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.deadline import Deadline
from forgekeeper.declaring import batch
from forgekeeper.failpoints import failpoint

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


@batch(document=None, outcome=Outcome)
def delete_objects(attempt: Attempt) -> None:
    """Run the batch for the message's row."""
    run(attempt.outcome, attempt.deadline(MAX_RUNTIME), attempt.settings)


def run(outcome: Outcome, deadline: Deadline, settings: Settings) -> None:
    """Delete what is due, a thousand objects at a time.

    Raises `StoreUnavailable` when the store does not answer, `Blocked` when there is none.
    """
    try:
        with BadRecords(delete_objects.actor_name, "deleted_object", deadline, DeletedObject.present) as bad:
            _end(outcome, _work_off(outcome, deadline, settings, bad))
    except StoreUnavailable as error:
        log.error("object store unavailable", location=stores.ARTIFACTS, error=str(error))  # noqa: TRY400, no trace
        _end(outcome, "store_unavailable")
        raise
    except Blocked:
        _end(outcome, "no_store")
        raise


def _end(outcome: Outcome, stopped: Stopped) -> None:
    outcome.stopped, outcome.remaining = stopped, DeletedObject.due(now()).count()


def _work_off(
    outcome: Outcome, deadline: Deadline, settings: Settings, bad: BadRecords
) -> Literal["drained", "deadline"]:
    store = stores.at(stores.ARTIFACTS, settings)
    if store is None:
        raise Blocked("no_store", f"no object store {stores.ARTIFACTS!r} is configured; set FORGEKEEPER_OBJECT_STORES")
    while True:
        # What was claimed is ours for so long; it is counted from before the claim.
        until = time.monotonic() + min(deadline.left(), settings.object_visibility.total_seconds())
        claimed, more = _claim(bad, settings)
        if not more:
            return "drained"
        failpoint("delete_objects.claimed")
        _delete(store, claimed, outcome, until, bad)
        if deadline.passed(len(claimed)):
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


def _delete(store: Objects, claimed: list[Claimed], outcome: Outcome, until: float, bad: BadRecords) -> None:
    named = JobArtifact.named([row.path for row in claimed])
    for row in claimed:
        if row.path in named:
            log.error("object kept, an artifact names it", path=row.path)
    paths = [row.path for row in claimed if row.path not in named]
    try:
        answers = store.delete(paths, until=until)
    except StoreUnavailable as error:
        _settle(claimed, {path: answer.state for path, answer in error.known.items()}, named, outcome, bad)
        raise
    failpoint("delete_objects.deleted")
    outside = [path for path, answer in answers.items() if OUTSIDE in answer.reason]
    if outside:
        log.error("objects not deleted", reason=OUTSIDE, objects=len(outside), first=outside[0])
    _settle(claimed, {path: answer.state for path, answer in answers.items()}, named, outcome, bad)


def _settle(claimed: list[Claimed], states: dict[str, str], named: set[str], outcome: Outcome, bad: BadRecords) -> None:
    """Remove the rows of what is gone, spend an attempt on what failed, give the rest back."""
    rows = {row.id: row for row in claimed}
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
    failpoint("delete_objects.forgotten")
    bad.each(fail, failed)
    settled = {*gone, *failed}
    left = [row.id for row in claimed if row.id not in settled]
    bad.each(lambda ids: DeletedObject.put_back([rows[number] for number in ids], now()), left)

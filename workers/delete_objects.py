"""Delete the objects whose artifacts are gone: the outbox of batch 11.

Runs every minute.  It claims rows of the outbox, deletes their objects in bulk, and
removes the rows.  An object that a live artifact still names is left alone.  What fails
comes back later, ten times; then it is dead, and `forgekeeper objects` shows it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import dramatiq
import structlog

from models import DeletedObject, JobArtifact, now
from models.deleted_object import Claimed
from settings import Settings
from storage.objects import Objects, StoreUnavailable
from workers import stores
from workers.attempt import current
from workers.broker import broker
from workers.deadline import Deadline
from workers.failpoints import failpoint

CHUNK = 1_000
FIRST_RETRY = timedelta(minutes=1)
MAX_RUNTIME = timedelta(minutes=4)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run came to; *remaining* is what is due afterwards."""

    deleted: int = 0
    missing: int = 0
    failed: int = 0
    remaining: int = 0
    stopped: Literal["drained", "deadline", "store_unavailable", "no_store"] = "drained"


@dataclass
class Tally:
    """The objects of a run so far."""

    deleted: int = 0
    missing: int = 0
    failed: int = 0

    def outcome(self, stopped: Literal["drained", "deadline", "store_unavailable", "no_store"]) -> Outcome:
        """Close the run."""
        return Outcome(self.deleted, self.missing, self.failed, DeletedObject.due(now()).count(), stopped)


@dramatiq.actor(broker=broker, queue_name="cron", document=None, time_limit=900_000)
def delete_objects() -> None:
    """Run the batch for the message's row."""
    attempt = current()
    attempt.outcome = run(attempt.deadline(MAX_RUNTIME), attempt.settings)


def run(deadline: Deadline, settings: Settings) -> Outcome:
    """Delete what is due, a thousand objects at a time."""
    tally = Tally()
    try:
        store = stores.at(stores.ARTIFACTS, settings)
        if store is None:
            return tally.outcome("no_store")
        while True:
            # What was claimed is ours for so long; it is counted from before the claim.
            until = time.monotonic() + min(deadline.left(), settings.object_visibility.total_seconds())
            claimed = DeletedObject.claim_due(now(), visibility=settings.object_visibility, limit=CHUNK)
            if not claimed:
                return tally.outcome("drained")
            failpoint("delete_objects.claimed")
            _delete(store, claimed, tally, until)
            if deadline.passed(len(claimed)):
                return tally.outcome("deadline")
    except StoreUnavailable as error:
        log.error("object store unavailable", location=stores.ARTIFACTS, error=str(error))  # noqa: TRY400, no trace
        return tally.outcome("store_unavailable")


def _delete(store: Objects, claimed: list[Claimed], tally: Tally, until: float) -> None:
    named = JobArtifact.named([row.path for row in claimed])
    for row in claimed:
        if row.path in named:
            log.error("object kept, an artifact names it", path=row.path)
    paths = [row.path for row in claimed if row.path not in named]
    try:
        outcomes = store.delete(paths, until=until)
    except StoreUnavailable as error:
        _settle(claimed, {path: outcome.state for path, outcome in error.known.items()}, named, tally)
        raise
    failpoint("delete_objects.deleted")
    _settle(claimed, {path: outcome.state for path, outcome in outcomes.items()}, named, tally)


def _settle(claimed: list[Claimed], states: dict[str, str], named: set[str], tally: Tally) -> None:
    """Remove the rows of what is gone, spend an attempt on what failed, give the rest back."""
    gone = [row for row in claimed if row.path in named or states.get(row.path) in ("deleted", "missing")]
    failed = [row for row in claimed if states.get(row.path) == "failed"]
    DeletedObject.forget(gone)
    failpoint("delete_objects.forgotten")
    died = DeletedObject.fail(failed, first_retry=FIRST_RETRY)
    DeletedObject.put_back([row for row in claimed if row not in gone and row not in failed], now())
    tally.deleted += sum(states.get(row.path) == "deleted" for row in gone)
    tally.missing += sum(states.get(row.path) == "missing" for row in gone)
    tally.failed += len(failed)
    if died:
        log.error("objects given up", objects=died)

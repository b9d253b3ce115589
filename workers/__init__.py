"""The batches: `dramatiq workers` finds them all here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dramatiq import Actor, Message

from workers.stale_direct_uploads import register
from forgekeeper.delivery.enqueue_unique import TOKEN
from forgekeeper.runs.ledger import JobRun
from forgekeeper.database import backlog, now
from forgekeeper.database.backlog import Backlog
from workers import (
    delete_objects,
    expired_job_artifacts,
    git_ref_cleanup,
    prune,
    stale_direct_uploads,
    stale_imports,
    user_status_cleanup,
)
from forgekeeper.process.broker import QUEUES, broker
from forgekeeper.connections import client

__all__ = ["BATCHES", "QUEUES", "Batch", "broker"]


@dataclass(frozen=True)
class Batch:
    """A batch as the scheduler and the command line know it."""

    actor: Actor[[], None]
    outcome: type[Any]
    budget: timedelta
    sentence: str
    backlog: Callable[[], Backlog] | None = None

    @property
    def name(self) -> str:
        """The batch's name: its actor's."""
        return self.actor.actor_name

    @property
    def queue(self) -> str:
        """The queue its messages go through."""
        return self.actor.queue_name

    def message(self, run: JobRun) -> Message[Any]:
        """Return the message by which a worker starts *run*, and none of the same number in another time."""
        return self.actor.message().copy(message_id=str(run.id), options={TOKEN: str(run.token)})

    @property
    def nothing(self) -> Any:
        """The outcome of a run that did nothing."""
        return self.outcome()


def _stale_uploads() -> Backlog:
    found = register.census(client, stale_direct_uploads.MAX_UPLOAD_DURATION)
    return Backlog(found.due, found.due_since)


def _stale_imports() -> Backlog:
    instant = now()
    imports, entities = backlog.bulk_imports(instant), backlog.bulk_import_entities(instant)
    oldest = min((found.oldest for found in (imports, entities) if found.oldest), default=None)
    return Backlog(imports.records + entities.records, oldest)


BATCHES: dict[str, Batch] = {
    batch.name: batch
    for batch in (
        Batch(
            user_status_cleanup.user_status_cleanup,
            user_status_cleanup.Outcome,
            user_status_cleanup.MAX_RUNTIME,
            "Delete user statuses whose time has passed.",
            lambda: backlog.user_statuses(now()),
        ),
        Batch(
            git_ref_cleanup.git_ref_cleanup,
            git_ref_cleanup.Outcome,
            git_ref_cleanup.LOCK_TIMEOUT,
            "Delete the git refs that projects want deleted, a child for each project.",
            backlog.git_ref_deletions,
        ),
        Batch(
            expired_job_artifacts.expired_job_artifacts,
            expired_job_artifacts.Outcome,
            expired_job_artifacts.PARENT_BUDGET,
            "Destroy expired CI artifacts in parallel buckets.",
            lambda: backlog.job_artifacts(now()),
        ),
        Batch(
            delete_objects.delete_objects,
            delete_objects.Outcome,
            delete_objects.MAX_RUNTIME,
            "Delete the objects of destroyed artifacts.",
            lambda: backlog.deleted_objects(now()),
        ),
        Batch(
            stale_direct_uploads.stale_direct_uploads,
            stale_direct_uploads.Outcome,
            stale_direct_uploads.MAX_EXEC_DURATION,
            "Delete uploads that began three hours ago and never completed.",
            _stale_uploads,
        ),
        Batch(
            stale_imports.stale_imports,
            stale_imports.Outcome,
            stale_imports.MAX_RUNTIME,
            "Give up bulk imports that nothing has touched for a day.",
            _stale_imports,
        ),
        Batch(prune.prune, prune.Outcome, prune.MAX_RUNTIME, "Remove forgekeeper's own old records."),
    )
}

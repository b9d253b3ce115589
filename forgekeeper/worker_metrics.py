"""What a worker counts: its runs, its children, and the thresholds of the documents.

`FIELDS` says which field of an outcome is which metric.  Counting never fails a run: what
goes wrong here is logged, and the run is none the worse.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from threading import get_ident
from typing import Any

import peewee as pw
import redis
import structlog
from dramatiq import Broker, Message, MessageProxy
from dramatiq.common import current_millis
from dramatiq.middleware import Middleware, MiddlewareError, TimeLimitExceeded
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper import shutdown
from forgekeeper.batches import BATCHES as DECLARED
from forgekeeper.database import now
from forgekeeper.delivery.queues import DUE
from forgekeeper.locks import LeaseLost
from forgekeeper.runs.ledger import JobRun, Started
from forgekeeper.storage import git_refs, git_repository, objects
from metrics.catalogue import BATCHES, FLAGS, LEASES, LEVELS, NO_BATCH
from metrics.counting import WORKER as COUNT

LATE = timedelta(minutes=1)
"""The documents promise a minute at most."""
DURATION = {"user_status_cleanup": 60.0, "stale_direct_uploads": 250.0, "expired_job_artifacts": 60.0}
"""Seconds that a run may take."""
FAILURES = {"stale_direct_uploads": 2, "expired_job_artifacts": 3}
"""So many failed attempts in a row are an alarm."""
BACKLOG = 10_000
"""More than so many left by a run of `user_status_cleanup` or `stale_direct_uploads` are an alarm."""
DEAD_LETTERS = {"git_ref_cleanup", "clean_project_refs"}

PASSED_OVER = (OSError, ValueError, pw.PeeweeException)
"""What may go wrong with counting."""

PROCESSED = "forgekeeper_records_processed_total"
EXAMINED = "forgekeeper_records_examined_total"
ERRORS = "forgekeeper_record_errors_total"
MISSING = "forgekeeper_missing_repositories_total"
CHILDREN = "forgekeeper_children_enqueued_total"
BREACHES = "forgekeeper_threshold_breaches_total"

# batch -> (metric, its labels behind the batch) -> fields of the outcome, added up
FIELDS: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "user_status_cleanup": {
        (EXAMINED, "user_status"): ("deleted",),
        (PROCESSED, "user_status"): ("deleted",),
    },
    "git_ref_cleanup": {
        (EXAMINED, "project"): ("total_projects",),
        (MISSING,): ("missing_repositories",),
        (CHILDREN, "clean_project_refs"): ("enqueued",),
    },
    "clean_project_refs": {
        (EXAMINED, "git_ref_deletion"): ("total_deletes", "rejected", "gone"),
        (PROCESSED, "git_ref_deletion"): ("total_deletes",),
        (PROCESSED, "gone_ref_deletion"): ("gone",),
        (ERRORS, "git_ref_deletion", "gitaly"): ("rejected",),
    },
    "stale_direct_uploads": {
        (EXAMINED, "pending_upload"): ("total_pending_entries",),
        (PROCESSED, "stale_upload"): ("total_deleted_stale_entries",),
        (ERRORS, "stale_upload", "object_storage"): ("failed_entries",),
    },
    "stale_imports": {
        (EXAMINED, "bulk_import_or_entity"): ("imports", "entities", "skipped", "failed"),
        (PROCESSED, "bulk_import"): ("imports",),
        (PROCESSED, "entity"): ("entities",),
        (PROCESSED, "tracker"): ("trackers",),
        (ERRORS, "bulk_import_or_entity", "state_transition"): ("failed",),
    },
    "expired_job_artifacts": {
        (CHILDREN, "delete_artifact_bucket"): ("children_enqueued",),
    },
    "delete_artifact_bucket": {
        (EXAMINED, "expired_artifact"): ("destroyed",),
        (PROCESSED, "expired_artifact"): ("destroyed",),
    },
    "delete_objects": {
        (EXAMINED, "deleted_object"): ("deleted", "missing", "failed"),
        (PROCESSED, "deleted_object"): ("deleted", "missing"),
        (ERRORS, "deleted_object", "object_storage"): ("failed",),
    },
    "prune": {
        (PROCESSED, "ref_deletion"): ("ref_deletions",),
        (PROCESSED, "job_run"): ("runs",),
        (PROCESSED, "dead_letter"): ("dead_letters",),
        (PROCESSED, "process"): ("processes",),
        (PROCESSED, "settled_upload"): ("uploads",),
    },
}
KINDS: tuple[tuple[str, tuple[type[BaseException], ...]], ...] = (
    ("database", (pw.PeeweeException, MaxConnectionsExceeded)),
    ("redis", (redis.RedisError,)),
    ("object_storage", (objects.StoreUnavailable,)),
    (
        "gitaly",
        (
            git_refs.RootUnavailable,
            git_refs.RepositoryMissing,
            git_repository.RepositoriesMissing,
            git_refs.RepositoryLocked,
            git_refs.RepositoryFailed,
            git_refs.GitTimedOut,
            git_refs.GitUnavailable,
        ),
    ),
    ("time_limit", (TimeLimitExceeded,)),
)

log = structlog.get_logger(__name__)


def run_started(batch: str, run: Started) -> None:
    """Count the start of a tick's run that comes too late."""
    with _harmless():
        first = run.tick is not None and run.attempt == 1
        if first and run.tick and current_millis() / 1000 - run.tick.timestamp() > LATE.total_seconds():
            COUNT.inc("forgekeeper_run_late_starts_total", batch)


def run_skipped(batch: str, reason: str) -> None:
    """Count a run that did not begin."""
    with _harmless():
        COUNT.inc("forgekeeper_runs_skipped_total", batch, reason)


def run_ended(
    batch: str, seconds: float, outcome: Any, error: BaseException | None, *, state: str | None, skipped: str | None
) -> None:
    """Count an attempt that has ended, and what its row has become; call it with a connection."""
    with _harmless():
        _ended(batch, seconds, outcome, error)
        if skipped is not None and error is None:
            run_skipped(batch, skipped)
        if skipped == "flag_unreadable":
            COUNT.inc("forgekeeper_feature_flag_errors_total", FLAGS[0])
        if state == "enqueued":
            COUNT.inc("forgekeeper_run_retries_total", batch)
        if error is None and skipped is None:
            _particulars(batch, outcome)
        elif error is not None and batch in FAILURES and JobRun.health(batch).failures >= FAILURES[batch]:
            COUNT.inc(BREACHES, batch, "consecutive_failures")


def child_ended(
    actor: str, seconds: float, outcome: Any, error: BaseException | None, *, skipped: str | None = None
) -> None:
    """Count a child that has ended."""
    with _harmless():
        _ended(actor, seconds, outcome, error)
        if skipped is not None and error is None:
            run_skipped(actor, skipped)
        elif actor in LEASES:
            _lease(actor, outcome, error)


def record_failed(batch: str, record: str, kind: str) -> None:
    """Count a record that failed alone and is passed over."""
    with _harmless():
        COUNT.inc(ERRORS, batch, record, kind)


def line_written(level: str) -> None:
    """Count a log line of that level."""
    # No line about a line that could not be counted.
    with suppress(OSError, ValueError):
        COUNT.inc("forgekeeper_log_messages_total", level if level in LEVELS else "info")


def given_up(actor: str) -> None:
    """Count a dead letter of that actor, of one that is no batch too."""
    with _harmless():
        COUNT.inc("forgekeeper_run_dead_letters_total", actor if actor in BATCHES else NO_BATCH)
        if actor in DEAD_LETTERS:
            COUNT.inc(BREACHES, actor, "dead_letter")


def kind(error: BaseException) -> str:
    """Name the kind of an error."""
    return next((name for name, classes in KINDS if isinstance(error, classes)), "other")


class Growth:
    """What an outcome has grown by since it was counted last: what is done is counted, whatever becomes of the run."""

    def __init__(self, batch: str, outcome: Any) -> None:
        self._batch = batch
        self._outcome = outcome
        self._counted = dict.fromkeys(FIELDS.get(batch, {}), 0)

    def count(self) -> None:
        """Count it."""
        with _harmless():
            for (metric, *labels), fields in FIELDS.get(self._batch, {}).items():
                total = sum(getattr(self._outcome, field) for field in fields)
                grown, self._counted[metric, *labels] = total - self._counted[metric, *labels], total
                if grown:
                    COUNT.inc(metric, self._batch, *labels, by=grown)


class Measuring(Middleware):
    """Counts messages where they pass.  It comes first: around all others, whatever they do with a message."""

    def __init__(self) -> None:
        # By thread too: a message may come again while its first copy is still in hand.
        self._began: dict[tuple[int, str], float] = {}

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Note until when a message is delayed: whoever finds it later must not take the delay for waiting."""
        if delay is not None:
            message.options[DUE] = current_millis() + delay

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Count a child's retry, once: when it is delayed, not when its time has come."""
        with _harmless():
            if delay is not None and message.options.get("retries") and message.actor_name in BATCHES:
                COUNT.inc("forgekeeper_run_retries_total", message.actor_name)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count a message in progress."""
        with _harmless():
            if message.actor_name in BATCHES:
                self._began[get_ident(), message.message_id] = current_millis()
                COUNT.inc("forgekeeper_runs_in_progress", message.actor_name)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Count it no longer; a message that could not even begin has failed."""
        began = self._leave(message)
        with _harmless():
            if began is not None:
                due = message.options.get(DUE) or message.message_timestamp
                COUNT.observe(
                    "forgekeeper_run_wait_seconds", message.actor_name, seconds=max(0.0, (began - due) / 1000)
                )
                if isinstance(exception, MiddlewareError):
                    _ended(
                        message.actor_name, (current_millis() - began) / 1000, None, exception.__cause__ or exception
                    )

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count it no longer."""
        self._leave(message)

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Count a dead letter."""
        given_up(message.actor_name)

    def _leave(self, message: MessageProxy) -> float | None:
        began = self._began.pop((get_ident(), message.message_id), None)
        if began is not None:
            with _harmless():
                COUNT.dec("forgekeeper_runs_in_progress", message.actor_name)
        return began


def _ended(batch: str, seconds: float, outcome: Any, error: BaseException | None) -> None:
    COUNT.inc("forgekeeper_runs_total", batch)
    COUNT.observe("forgekeeper_run_duration_seconds", batch, seconds=seconds)
    if seconds > DURATION.get(batch, seconds):
        COUNT.inc(BREACHES, batch, "duration")
    if error is not None:
        COUNT.inc("forgekeeper_run_failures_total", batch, kind(error))
    # A run that drains ends as if its budget were used up, but nobody has to worry.
    if _timed_out(outcome) and error is None and not shutdown.requested.is_set():
        COUNT.inc("forgekeeper_run_timeouts_total", batch)


def _timed_out(outcome: Any) -> bool:
    return getattr(outcome, "stopped", None) == "deadline" or getattr(outcome, "execution_timeout", False)


def _particulars(batch: str, outcome: Any) -> None:
    """Count what only one batch has."""
    if batch == "user_status_cleanup":
        # One that has drained leaves what somebody else has locked.
        if DECLARED[batch].backlogs["user_status"](now()).records > BACKLOG:
            COUNT.inc(BREACHES, batch, "backlog")
    elif batch == "stale_direct_uploads":
        if outcome.total_pending_entries - outcome.total_deleted_stale_entries > BACKLOG:
            COUNT.inc(BREACHES, batch, "backlog")
    elif batch == "git_ref_cleanup" and outcome.stopped == "max_projects":
        COUNT.inc("forgekeeper_fanout_limit_reached_total", batch)
    elif batch == "expired_job_artifacts":
        COUNT.inc("forgekeeper_buckets_recovered_total", by=outcome.stale_count)
        COUNT.inc("forgekeeper_buckets_refilled_total", by=outcome.missing_count)


def _lease(family: str, outcome: Any, error: BaseException | None) -> None:
    if error is None and outcome.stopped == "lease_held":
        COUNT.inc("forgekeeper_lease_contentions_total", family)
        COUNT.inc("forgekeeper_runs_skipped_total", family, "lease_held")
    elif not isinstance(error, redis.RedisError):
        COUNT.inc("forgekeeper_lease_acquisitions_total", family)
    if isinstance(error, LeaseLost):
        COUNT.inc("forgekeeper_lease_lost_total", family)


class _harmless:  # noqa: N801, used as a word; a generator would take longer than to count
    """Let nothing that goes wrong with counting reach the run."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, PASSED_OVER):
            return False
        log.debug("not counted", error=str(error))
        return True

"""Metrics of batches and children: growing outcomes, ends of attempts, crossed limits.

Counting never fails a run: its errors are logged at debug level.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import peewee as pw
import redis
import structlog
from dramatiq.common import current_millis
from dramatiq.middleware import TimeLimitExceeded
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.api.batches import BatchSpec, Declaration, find_declaration
from forgekeeper.api.records import Fields
from forgekeeper.ledger.job_runs import JobRun, StartedRun
from forgekeeper.platform import shutdown
from forgekeeper.platform.coordination.leases import LeaseLost
from forgekeeper.platform.database import now
from metrics.instruments import BREACHES_METRIC, WORKER_METRICS, count_dead_letter
from metrics.logs import describe_error

LATE_AFTER = timedelta(minutes=1)
"""Time after its tick until a run starts late; the documents promise a minute at most."""
PROCESSED_METRIC = "forgekeeper_records_processed_total"
EXAMINED_METRIC = "forgekeeper_records_examined_total"
FREED_BYTES_METRIC = "forgekeeper_freed_bytes_total"
RECORD_ERRORS_METRIC = "forgekeeper_record_errors_total"
CHILDREN_METRIC = "forgekeeper_children_enqueued_total"
LIBRARY_ERROR_KINDS: tuple[tuple[str, tuple[type[BaseException], ...]], ...] = (
    ("database", (pw.PeeweeException, MaxConnectionsExceeded)),
    ("redis", (redis.RedisError,)),
    ("time_limit", (TimeLimitExceeded,)),
)
"""Kinds of errors of libraries; our own exceptions have an attribute `error_kind`."""

log = structlog.get_logger(__name__)


@contextmanager
def suppress_count_errors() -> Iterator[None]:
    """Log errors of counting, so that they do not fail the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001, the run does not depend on it
        log.debug("metric not counted", error=describe_error(error))


def classify_error(error: BaseException) -> str:
    """Return the kind of an error."""
    own_kind: str | None = getattr(error, "error_kind", None)
    return own_kind or next((name for name, classes in LIBRARY_ERROR_KINDS if isinstance(error, classes)), "other")


class OutcomeCounter:
    """Counter of the growth of an outcome since the last count."""

    def __init__(self, declared: Declaration, outcome: Any) -> None:
        self._metrics = tuple(list_outcome_metrics(declared))
        self._outcome = outcome
        self._counted: dict[str, int] = {}

    def count_growth(self) -> None:
        """Count the growth, even if the run fails later."""
        fields = {name: value for name, value in vars(self._outcome).items() if type(value) is int}
        grown = {name: value - self._counted.get(name, 0) for name, value in fields.items()}
        self._counted = fields
        for metric, labels, names in self._metrics if any(grown.values()) else ():
            with suppress_count_errors():
                WORKER_METRICS.inc(metric, *labels, by=sum(grown.get(name, 0) for name in names))


def list_outcome_metrics(declared: Declaration) -> Iterator[tuple[str, tuple[str, ...], Fields]]:
    """Yield the metrics of an outcome: the name, its labels, and the fields that are added up."""
    name = declared.name
    for record in declared.records:
        yield EXAMINED_METRIC, (name, record.name), record.examined
        yield PROCESSED_METRIC, (name, record.name), record.processed
        if record.bytes:
            yield FREED_BYTES_METRIC, (name, record.name), record.bytes
        for error_kind, fields in record.errors.items():
            yield RECORD_ERRORS_METRIC, (name, record.name, error_kind), fields
    for own in declared.counters:
        yield f"forgekeeper_{own.name}_total", (name,) if own.by_batch else (), own.fields
    if isinstance(declared, BatchSpec):
        for child in declared.children:
            yield CHILDREN_METRIC, (name, child.name), (child.enqueued_as,)


@suppress_count_errors()
def count_failed_record(batch: str, record: str) -> None:
    """Count a record that failed alone."""
    WORKER_METRICS.inc(RECORD_ERRORS_METRIC, batch, record, "database")


@suppress_count_errors()
def count_skipped_run(batch: str, reason: str) -> None:
    """Count a run that did not begin, or ended without work."""
    WORKER_METRICS.inc("forgekeeper_runs_skipped_total", batch, reason)


@suppress_count_errors()
def count_late_start(batch: str, started: StartedRun) -> None:
    """Count a tick whose run begins late; a run that a person has sent is never late."""
    late = started.tick and current_millis() / 1000 - started.tick.timestamp() > LATE_AFTER.total_seconds()
    if late and started.attempt == 1:
        WORKER_METRICS.inc("forgekeeper_run_late_starts_total", batch)


@suppress_count_errors()
def count_attempt(
    declared: Declaration,
    seconds: float,
    outcome: Any,
    error: BaseException | None,
    *,
    state: str | None,
    skipped: str | None,
) -> None:
    """Count an attempt that has ended; *state* is the new state of its row.

    A failed child waits for a person.
    """
    name = declared.name
    count_duration_and_failure(name, seconds, error, outcome)
    if state == "enqueued":
        WORKER_METRICS.inc("forgekeeper_run_retries_total", name)
    elif state == "failed":
        count_dead_letter(name)
    if declared.lease and (error is not None or skipped is None):
        _count_lease_result(name, outcome, error)
    if error is not None:
        limit = declared.find_threshold("consecutive_failures")
        if limit is not None and JobRun.read_health(name).failures >= limit.above:
            WORKER_METRICS.inc(BREACHES_METRIC, name, limit.name)
    elif skipped is not None:
        count_skipped_run(name, skipped)
        if skipped == "flag_unreadable" and declared.batch.flag is not None:
            WORKER_METRICS.inc("forgekeeper_feature_flag_errors_total", declared.batch.flag)
    else:
        _count_stop_and_backlog(declared, outcome)


def count_duration_and_failure(name: str, seconds: float, error: BaseException | None, outcome: Any = None) -> None:
    """Count how an attempt of a batch or child has ended, and how long it took."""
    WORKER_METRICS.inc("forgekeeper_runs_total", name)
    WORKER_METRICS.observe("forgekeeper_run_duration_seconds", name, seconds=seconds)
    timed_out = getattr(outcome, "stopped", None) == "deadline" or getattr(outcome, "execution_timeout", False)
    declared = find_declaration(name)
    limit = declared.find_threshold("duration") if declared else None
    if limit is not None and seconds > limit.above:
        WORKER_METRICS.inc(BREACHES_METRIC, name, "duration")
    if error is not None:
        WORKER_METRICS.inc("forgekeeper_run_failures_total", name, classify_error(error))
    # A run that drains ends as if its budget were used up, but is not a timeout.
    elif timed_out and not shutdown.requested.is_set():
        WORKER_METRICS.inc("forgekeeper_run_timeouts_total", name)


def _count_stop_and_backlog(declared: Declaration, outcome: Any) -> None:
    """Count the reason of a stop, if the declaration counts it, and a backlog above its limit."""
    for own in declared.counters:
        if own.stopped is not None and getattr(outcome, "stopped", None) == own.stopped:
            WORKER_METRICS.inc(f"forgekeeper_{own.name}_total", *((declared.name,) if own.by_batch else ()))
    limit = declared.find_threshold("backlog")
    if limit is None:
        return
    if limit.found:
        left = sum(getattr(outcome, one) for one in limit.found) - sum(getattr(outcome, one) for one in limit.done)
    else:
        due = declared.batch.sum_backlogs(now())
        left = due.records if due else 0
    if left > limit.above:
        WORKER_METRICS.inc(BREACHES_METRIC, declared.name, limit.name)


def _count_lease_result(name: str, outcome: Any, error: BaseException | None) -> None:
    if error is None and getattr(outcome, "stopped", None) == "lease_held":
        WORKER_METRICS.inc("forgekeeper_lease_contentions_total", name)
        count_skipped_run(name, "lease_held")
    elif not isinstance(error, redis.RedisError):
        WORKER_METRICS.inc("forgekeeper_lease_acquisitions_total", name)
    if isinstance(error, LeaseLost):
        WORKER_METRICS.inc("forgekeeper_lease_lost_total", name)

"""What a worker counts: its runs, its children, and the thresholds of the documents.

`count` is told of all that happens; a batch's declaration says what of it is which metric.  Counting never fails a
run: what goes wrong here is logged, and the run is none the worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple

import peewee as pw
import redis
import structlog
from dramatiq import Broker, MessageProxy
from dramatiq.common import current_millis
from dramatiq.middleware import Middleware, MiddlewareError, TimeLimitExceeded
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper import events, shutdown
from forgekeeper.batches import BatchSpec, Declared, Fields, Threshold, spec
from forgekeeper.database import now
from forgekeeper.locks import LeaseLost
from forgekeeper.runs.ledger import JobRun
from metrics.catalogue.labels import LEVELS, NO_BATCH
from metrics.counting import WORKER as COUNT

LATE = timedelta(minutes=1)
"""The documents promise a minute at most."""

PASSED_OVER = (OSError, ValueError, pw.PeeweeException)
"""What may go wrong with counting."""

PROCESSED = "forgekeeper_records_processed_total"
EXAMINED = "forgekeeper_records_examined_total"
ERRORS = "forgekeeper_record_errors_total"
CHILDREN = "forgekeeper_children_enqueued_total"
BREACHES = "forgekeeper_threshold_breaches_total"

KINDS: tuple[tuple[str, tuple[type[BaseException], ...]], ...] = (
    ("database", (pw.PeeweeException, MaxConnectionsExceeded)),
    ("redis", (redis.RedisError,)),
    ("time_limit", (TimeLimitExceeded,)),
)
"""The kinds of others' errors; our own say theirs: `error_kind`."""

log = structlog.get_logger(__name__)


def count(event: events.Event) -> None:
    """Count what happens."""
    if isinstance(event, events.LineWritten):
        # No line about a line that could not be counted.
        with suppress(OSError, ValueError):
            COUNT.inc("forgekeeper_log_messages_total", event.level if event.level in LEVELS else "info")
        return
    with _harmless():
        _count(event)


def _count(event: events.Event) -> None:
    match event:
        case events.OutcomeGrew():
            _grew(event)
        case events.RunSkipped(batch, reason):
            COUNT.inc("forgekeeper_runs_skipped_total", batch, reason)
        case events.RunStarted():
            _started(event)
        case events.RunEnded():
            _run_ended(event)
        case events.ChildEnded():
            _child_ended(event)
        case events.RecordFailed(batch, record, kind_):
            COUNT.inc(ERRORS, batch, record, kind_)
        case events.DeadLettered(actor):
            _dead_lettered(actor)


class Rule(NamedTuple):
    """What of an outcome is a metric: its *fields*, added up."""

    metric: str
    labels: tuple[str, ...]
    fields: Fields


@cache
def rules(declared: Declared) -> tuple[Rule, ...]:
    """List what of the outcome is counted as it grows."""
    return tuple(_rules(declared))


def _rules(declared: Declared) -> Iterator[Rule]:
    name = declared.name
    for record in declared.records:
        for kind_, fields in record.errors.items():
            yield Rule(ERRORS, (name, record.name, kind_), fields)
        yield Rule(EXAMINED, (name, record.name), record.examined)
        yield Rule(PROCESSED, (name, record.name), record.processed)
    for own in declared.counters:
        yield Rule(f"forgekeeper_{own.name}_total", (name,) if own.by_batch else (), own.fields)
    if isinstance(declared, BatchSpec):
        for child in declared.children:
            yield Rule(CHILDREN, (name, child.name), (child.enqueued_as,))


def _grew(event: events.OutcomeGrew) -> None:
    declared = spec(event.batch)
    for metric, labels, fields in rules(declared) if declared else ():
        if grown := sum(event.by.get(field, 0) for field in fields):
            with _harmless():
                COUNT.inc(metric, *labels, by=grown)


def _started(run: events.RunStarted) -> None:
    if run.tick and run.attempt == 1 and current_millis() / 1000 - run.tick.timestamp() > LATE.total_seconds():
        COUNT.inc("forgekeeper_run_late_starts_total", run.batch)


def _run_ended(run: events.RunEnded) -> None:
    declared = spec(run.batch)
    _ended(run.batch, run.seconds, run.outcome, run.error)
    if run.skipped is not None and run.error is None:
        COUNT.inc("forgekeeper_runs_skipped_total", run.batch, run.skipped)
    if run.state == "enqueued":
        COUNT.inc("forgekeeper_run_retries_total", run.batch)
    elif run.state == "failed":
        _dead_lettered(run.batch)
    if not isinstance(declared, BatchSpec):
        return
    if run.skipped == "flag_unreadable" and declared.flag is not None:
        COUNT.inc("forgekeeper_feature_flag_errors_total", declared.flag)
    if run.error is None and run.skipped is None:
        _count_stops(declared, run.outcome)
        _breach(declared, "backlog", lambda limit: _left(declared, limit, run.outcome) > limit.above)
    elif run.error is not None:
        _breach(declared, "consecutive_failures", lambda limit: JobRun.health(run.batch).failures >= limit.above)


def _child_ended(child: events.ChildEnded) -> None:
    declared = spec(child.child)
    _ended(child.child, child.seconds, child.outcome, child.error)
    if child.skipped is not None and child.error is None:
        COUNT.inc("forgekeeper_runs_skipped_total", child.child, child.skipped)
        return
    if declared is None:
        return
    if child.error is not None:
        COUNT.inc("forgekeeper_run_retries_total", child.child)
    if declared.lease:
        _lease(child.child, child.outcome, child.error)
    if child.error is None:
        _count_stops(declared, child.outcome)


def _dead_lettered(actor: str) -> None:
    declared = spec(actor)
    COUNT.inc("forgekeeper_run_dead_letters_total", actor if declared else NO_BATCH)
    if declared:
        _breach(declared, "dead_letter", lambda _limit: True)


def _ended(batch: str, seconds: float, outcome: object, error: BaseException | None) -> None:
    COUNT.inc("forgekeeper_runs_total", batch)
    COUNT.observe("forgekeeper_run_duration_seconds", batch, seconds=seconds)
    if declared := spec(batch):
        _breach(declared, "duration", lambda limit: seconds > limit.above)
    if error is not None:
        COUNT.inc("forgekeeper_run_failures_total", batch, kind(error))
    # A run that drains ends as if its budget were used up, but nobody has to worry.
    if _timed_out(outcome) and error is None and not shutdown.requested.is_set():
        COUNT.inc("forgekeeper_run_timeouts_total", batch)


def _breach(declared: Declared, name: str, crossed: Callable[[Threshold], bool]) -> None:
    limit = declared.limit(name)
    if limit is not None and crossed(limit):
        COUNT.inc(BREACHES, declared.name, name)


def _left(batch: BatchSpec, limit: Threshold, outcome: object) -> int:
    """Return what a run has left; one that has drained leaves what somebody else has locked."""
    if limit.found:
        return _sum(outcome, limit.found) - _sum(outcome, limit.done)
    due = batch.due(now())
    return due.records if due else 0


def _sum(outcome: object, fields: Fields) -> int:
    values: list[int] = [getattr(outcome, field) for field in fields]
    return sum(values)


def _count_stops(declared: Declared, outcome: object) -> None:
    for own in declared.counters:
        if own.stopped is not None and getattr(outcome, "stopped", None) == own.stopped:
            COUNT.inc(f"forgekeeper_{own.name}_total", *((declared.name,) if own.by_batch else ()))


def _timed_out(outcome: object) -> bool:
    return getattr(outcome, "stopped", None) == "deadline" or getattr(outcome, "execution_timeout", False)


def _lease(family: str, outcome: object, error: BaseException | None) -> None:
    if error is None and getattr(outcome, "stopped", None) == "lease_held":
        COUNT.inc("forgekeeper_lease_contentions_total", family)
        COUNT.inc("forgekeeper_runs_skipped_total", family, "lease_held")
    elif not isinstance(error, redis.RedisError):
        COUNT.inc("forgekeeper_lease_acquisitions_total", family)
    if isinstance(error, LeaseLost):
        COUNT.inc("forgekeeper_lease_lost_total", family)


def kind(error: BaseException) -> str:
    """Name the kind of an error."""
    known: str | None = getattr(error, "error_kind", None)
    return known or next((name for name, classes in KINDS if isinstance(error, classes)), "other")


class WorkerMetrics(Middleware):
    """Counts messages where they pass.  It comes first: around all others, whatever they do with a message."""

    def __init__(self) -> None:
        # By thread too: a message may come again while its first copy is still in hand.
        self._began: dict[tuple[int, str], float] = {}

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count a message in progress."""
        with _harmless():
            if spec(message.actor_name):
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
        began, actor = self._leave(message), message.actor_name
        if began is None:
            return
        with _harmless():
            waited = max(0.0, (began - message.message_timestamp) / 1000)
            COUNT.observe("forgekeeper_run_wait_seconds", actor, seconds=waited)
            if isinstance(exception, MiddlewareError):
                _ended(actor, (current_millis() - began) / 1000, None, exception.__cause__ or exception)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count it no longer."""
        self._leave(message)

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Tell of a dead letter."""
        events.emit(events.DeadLettered(message.actor_name))

    def _leave(self, message: MessageProxy) -> float | None:
        began = self._began.pop((get_ident(), message.message_id), None)
        if began is not None:
            with _harmless():
                COUNT.dec("forgekeeper_runs_in_progress", message.actor_name)
        return began


class _harmless:  # noqa: N801, used as a word; a generator would take longer than to count
    """Let nothing that goes wrong with counting reach the run."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, PASSED_OVER):
            return False
        log.debug("not counted", error=str(error))
        return True

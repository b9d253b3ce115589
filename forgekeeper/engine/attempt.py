"""One attempt at a run or at a child, from its first log line to its last.

Workers and `forgekeeper run` share it.  A run has a row in the ledger, which the attempt keeps alive and closes.  A
child works without a row: its records are claimed in their source, so losing a child, or executing it twice, is
harmless.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Self, TypeVar

import peewee as pw
import structlog

from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.api.batches import BatchSpec, ChildSpec, Declaration
from forgekeeper.audit.deletions import Audit
from forgekeeper.engine import record_counts
from forgekeeper.engine.run import Run
from forgekeeper.engine.shared_work import SharedWork
from forgekeeper.engine.tracing import AttemptSpan, Tracing
from forgekeeper.guards import breaker, preconditions
from forgekeeper.guards.deadline import Deadline
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.heartbeats import Heartbeat, LostRun, WatchedRun
from forgekeeper.ledger.holds import Batch, BatchHeld
from forgekeeper.ledger.job_runs import JobRun, StartedRun
from forgekeeper.ledger.retry_delays import MAX_RETRIES, compute_backoff
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.database import database, is_connected, release_connection
from forgekeeper.platform.database.sessions import read_only_session
from forgekeeper.platform.failpoints import arm_failpoints, failpoint
from forgekeeper.platform.settings import Settings
from metrics.logs import clean_text, describe_error

MAX_PRECONDITIONS_AGE_SECONDS = 1.0
"""Seconds for which the children of a process share a check of their batch's preconditions.

A run relies on its check until its budget is used up, minutes later.
"""
WriteResult = TypeVar("WriteResult")

log = structlog.get_logger(__name__)


class Runner:
    """Factory of the attempts of a process; the *heartbeat* keeps their rows alive.

    Without a *heartbeat* the runner starts its own.  *fan_out* sends children of the run with a number.
    """

    def __init__(
        self,
        settings: Settings,
        fan_out: Callable[..., EnqueueCounts],
        heartbeat: Heartbeat | None = None,
    ) -> None:
        arm_failpoints(settings.failpoints)
        self.settings = settings
        self.fan_out = fan_out
        self.tracing = Tracing.from_settings(settings)
        self._checked_at: dict[str, float] = {}
        self.heartbeat = heartbeat or Heartbeat("run", dead_after=settings.dead_after)
        if heartbeat is None:
            self.heartbeat.start()

    def stop(self) -> None:
        """End the heartbeat; runs that are still open will be found lost."""
        self.heartbeat.stop()

    def check_preconditions(self, declared: Declaration) -> bool:
        """Check the preconditions of a run, or of a child unless another child's check is a second old at most.

        Returns whether they were checked now; raises `Blocked`.
        """
        batch, began = declared.batch, time.monotonic()
        checked_at = self._checked_at.get(batch.name)
        if isinstance(declared, ChildSpec) and checked_at and began - checked_at < MAX_PRECONDITIONS_AGE_SECONDS:
            return False
        preconditions.require_met(batch, self.settings)
        self._checked_at[batch.name] = began
        return True

    def create_attempt(self, batch: BatchSpec, started: StartedRun, *, final: bool = False) -> Attempt:
        """Create an attempt at a started run."""
        return Attempt(self, batch, str(started.id), started.id, started, final=final)

    def create_child_attempt(
        self, child: ChildSpec, message_id: str, shared: SharedWork, *, run: int | None = None
    ) -> Attempt:
        """Create an attempt at a child; *shared* is the work of its message, *run* the run that sent it, if known."""
        return Attempt(self, child, message_id, run, shared=shared)


class Attempt:
    """Context manager of an attempt: its heartbeat, log lines, counts, and end in the ledger.

    An `Exception` within is stored in *error* and not re-raised.  An exception that ends the process is re-raised, and
    the row is left to expire.  *state* is the new state of a run's row, or None if another process has taken the row.
    Of a failed child, *state* is `failed` if it waits for a person.  A *final* attempt at a run is not retried.
    """

    def __init__(
        self,
        runner: Runner,
        declared: Declaration,
        message_id: str,
        number: int | None,
        started: StartedRun | None = None,
        *,
        final: bool = False,
        shared: SharedWork | None = None,
    ) -> None:
        settings = runner.settings
        self.declared = declared
        self.message_id = message_id
        self.row = WatchedRun(started, self.result_fields, dead_after=settings.dead_after) if started else None
        self.blocked: Blocked | None = None
        self.held: BatchHeld | None = None
        self.error: BaseException | None = None
        self.state: str | None = None
        self.is_ordinary: bool | None = None
        self._settings = settings
        self._runner = runner
        self._is_final = final
        self._span: AttemptSpan | None = None
        self._started_monotonic = time.monotonic()
        batch, tick, child = declared.batch.name, started and started.tick, None if started else message_id
        audit = Audit(batch, on=settings.is_audited(batch), run=number, tick=tick, child=child)
        fan_out = partial(runner.fan_out, started.id) if started else None
        self.run: Run[Any] = Run(declared, settings, number=number, audit=audit, fan_out=fan_out, shared=shared)
        self._guard = self.run.guard
        self._outcome_counter = record_counts.OutcomeCounter(declared, self.run.outcome)
        self.run.deadline = self._start_deadline()

    def __enter__(self) -> Self:
        """Begin the attempt in this thread, and add its facts to the thread's log lines."""
        facts: dict[str, Any] = {"batch": self.declared.name, "run": self.run.number}
        if self.row is not None:
            started = self.row.started
            facts |= {"attempt": started.attempt, "tick": started.tick and started.tick.isoformat()}
        structlog.contextvars.bind_contextvars(**facts, message_id=self.message_id, worker=process_identity())
        if self.row is None:
            # A tenth of a small child's Python is a log line, and "child finished" says all that this one does.
            log.debug("child started")
        else:
            log.info("run started")
            self._runner.heartbeat.watch(self.row)
        if self._runner.tracing is not None:
            self._start_span(self._runner.tracing)
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        """Close the attempt, unless the process has to end at once."""
        if error is not None and not isinstance(error, Exception):
            return False
        self.close(error)
        return True

    def work_if_allowed(self, *args: object, **kwargs: object) -> None:
        """Do the declared work, unless the attempt is blocked, held or skipped."""
        try:
            self.run.skipped = self._guard.find_stop_reason()
            if self.run.skipped is None:
                # The checks take time, in which the batch may be stopped.
                checked = self._runner.check_preconditions(self.declared)
                self._ask_breaker()
                self.run.skipped = self._guard.find_stop_reason(now=checked)
            if self.run.skipped is None:
                # The checks above do not use up the budget.
                self.run.deadline = self._start_deadline()
                if self._span is not None:
                    self._span.start_chunk()
                with self._open_session():
                    self.declared.work(self.run, *args, **kwargs)
        except Blocked as blocked:
            self.blocked, self.run.skipped = blocked, blocked.reason
        except BatchHeld as held:
            self.held, self.run.skipped = held, "held"

    def _open_session(self) -> AbstractContextManager[None]:
        """Let PostgreSQL refuse writes of the batch, unless it has to write by itself."""
        if self.declared.batch.writes is not None:
            return nullcontext()
        return self.run.shared.session() if self.run.shared else read_only_session(self.declared.name)

    def _ask_breaker(self) -> None:
        """Let a run of a batch begin, with its children, or raise `BatchHeld`."""
        if self.row is None or not isinstance(self.declared, BatchSpec):
            return
        batch, number = self.declared, self.row.started.id
        if self._guard.has_release:
            breaker.begin_release(batch.name, number)
        released = self._guard.has_release and breaker.is_released(batch.name, number)
        self.is_ordinary = breaker.check_run(batch, self._settings, number, self.run.now, released=released)
        # Not earlier: until the breaker answers, the release limits children of earlier runs.
        if self._guard.has_release and not released:
            breaker.end_release(batch.name)
            self._guard.find_stop_reason(now=True)

    def close(self, error: BaseException | None) -> None:
        """Close the attempt with an *error* of any kind, or with the outcome; needs a connection."""
        self.error = error
        try:
            if self.row is None:
                self._end_child()
            else:
                # If the server is away, only the audit knows the number of deletions.
                write_or_log("totals not written", self._guard.count_unreserved)
                self.state = self._end_run(self.row.started)
        finally:
            if self.row is not None:
                self._runner.heartbeat.stop_watching(self.row)
            self._outcome_counter.count_growth()
            self._count_end()
            self._end_span()
            structlog.contextvars.clear_contextvars()

    @property
    def run_number(self) -> int | None:
        """The id of the run, or of the run that sent the child."""
        return self.run.number

    @property
    def wants_successor(self) -> bool:
        """Whether a child ended without an error and has left work for the next child."""
        return self.run.has_more_work and self.error is None and self.blocked is None and self._stop_reason is None

    def result_fields(self) -> dict[str, Any]:
        """Return the outcome's fields as they are now.

        If the attempt was braked, skipped, blocked or held, the reasons are added.
        """
        fields = asdict(self.run.outcome)
        if self._stop_reason is not None:
            return (
                fields | ({"stopped": self._stop_reason} if "stopped" in fields else {}) | {"braked": self._stop_reason}
            )
        fields |= {"skipped": self.run.skipped} if self.run.skipped else {}
        sentences = {"blocked": self.blocked, "held": self.held}
        return fields | {name: clean_text(str(why)) for name, why in sentences.items() if why is not None}

    def _start_deadline(self) -> Deadline:
        """Start the budget; each of its safe points counts the outcome's growth."""
        pace = self._settings.max_records_per_second(self.declared.batch.name)
        check = (lambda: None) if self.row is None else self.row.require_ours
        return Deadline(
            self.run.shared.budget_left() if self.run.shared else self.declared.budget,
            safe_point=check,
            on_progress=self._count_growth,
            find_stop_reason=self._guard.find_stop_reason,
            pace=pace,
        )

    def _count_growth(self) -> None:
        self._outcome_counter.count_growth()
        if self._span is not None:
            self._span.note_progress(self._count_deleted())

    def _count_deleted(self) -> int:
        """Return how many records the attempt has deleted, as limits count them."""
        return sum(getattr(self.run.outcome, field) for field in self.declared.counted_fields)

    def _start_span(self, tracing: Tracing) -> None:
        attempt = None if self.row is None else self.row.started.attempt
        with record_counts.suppress_count_errors():
            self._span = tracing.start_attempt(self.declared, run=self.run.number, attempt=attempt, key=self.message_id)

    def _end_span(self) -> None:
        if self._span is None:
            return
        with record_counts.suppress_count_errors():
            fields = self.result_fields()
            stopped = fields.get("stopped") or fields.get("skipped")
            self._span.end(self._count_deleted(), stopped, self.error)

    @property
    def _stop_reason(self) -> str | None:
        """Why the attempt ended before its work was done, if it did anything at all."""
        return None if self.run.skipped else self._guard.stop_reason

    def _end_run(self, started: StartedRun) -> str | None:
        """Close the row and log the end; return its state, None if another process has the row."""
        result = self.result_fields()
        state = (
            None
            if isinstance(self.error, LostRun)
            else _write_with_reconnect(partial(self._close_row, started, result))
        )
        facts = {"seconds": self._elapsed_seconds()} | result
        if state is None:
            log.warning("run lost", **facts)
        elif self.error is not None:
            # `forgekeeper run` prints the error itself; its traceback is logged at debug level only.
            hides_trace = self._is_final and not log.is_enabled_for(logging.DEBUG)
            log.error("run failed", state=state, exc_info=self.error, hides_trace=hides_trace, **facts)
        elif state == "succeeded":
            log.info("run finished", **facts)
        else:
            log.error("run blocked" if self.held is None else "run held", **facts)
        if self.error is None:
            failpoint("run.closed")
        return state

    def _close_row(self, started: StartedRun, result: dict[str, Any]) -> str | None:
        if self.error is not None:
            delay = compute_backoff(started.failures, first=self._settings.retry_after)
            retries = 0 if self._is_final else MAX_RETRIES
            return JobRun.fail(started, describe_error(self.error), result, delay=delay, retries=retries)
        if self.held is not None:
            return JobRun.hold(
                started, result, kind=self.held.kind, sentence=clean_text(str(self.held)), by=process_identity()
            )
        if self.blocked is not None:
            return JobRun.block(started, result, reason=self.blocked.reason, sentence=clean_text(str(self.blocked)))
        return JobRun.succeed(started, result, ordinary=self.is_ordinary)

    def _end_child(self) -> None:
        """Put a failed child into quarantine; the end of its message forgets failures of a child that succeeded.

        A change that cannot be written now is left to the child's next end.
        """
        facts = {"seconds": self._elapsed_seconds()} | self.result_fields()
        batch, name, key = self.declared.batch.name, self.declared.name, self.message_id
        if self.error is not None:
            log.error("child failed", exc_info=self.error, **facts)
            fail = partial(
                quarantine.record_failure, batch, name, key, describe_error(self.error), reason="child_failed"
            )
            waits = write_or_log("quarantine not written", partial(fail, run=self.run.number))
            self.state = "failed" if waits else "enqueued"
        elif self.blocked is not None:
            log.error("child blocked", **facts)
            why = {"reason": self.blocked.reason, "sentence": clean_text(str(self.blocked))}
            write_or_log("block not noted", partial(Batch.block, batch, child=True, **why))
        else:
            log.info("child finished", more=self.run.has_more_work, **facts)
            # A child that was braked has not shown that its work can succeed.
            if self._guard.stop_reason is None and self.run.shared is not None:
                self.run.shared.note_success(key)

    def _count_end(self) -> None:
        facts = self._elapsed_seconds(), self.run.outcome, self.error
        record_counts.count_attempt(self.declared, *facts, state=self.state, skipped=self.run.skipped)

    def _elapsed_seconds(self) -> float:
        return round(time.monotonic() - self._started_monotonic, 3)


def _write_with_reconnect(write: Callable[[], WriteResult]) -> WriteResult:
    try:
        return write()
    except pw.PeeweeException:
        if is_connected():
            raise
        # Perhaps only this connection is broken: a run that can record its end is not lost with its worker.
        release_connection()
        database.connect()
        return write()


def write_or_log(failure: str, write: Callable[[], WriteResult]) -> WriteResult | None:
    """Write something that the attempt can end without; if that fails, log the *failure*."""
    try:
        return _write_with_reconnect(write)
    except pw.PeeweeException as error:
        log.warning(failure, error=describe_error(error))
        return None

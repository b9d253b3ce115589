"""One attempt at a run, from the guarded update that starts it to the one that closes it.

The same in a worker and in `forgekeeper run`.  A batch never runs outside an attempt.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import peewee as pw
import structlog
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.database import database, reachable, release
from forgekeeper.delivery.enqueue_many import enqueue_many
from forgekeeper.fan_out import Enqueued, Keyed
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.growth import Growth
from forgekeeper.runs.ledger import MAX_RETRIES, JobRun, Started
from forgekeeper.settings import Settings
from metrics.redaction import clean, text_of

LONGEST_RETRY = timedelta(hours=1)
"""Twenty-five retries at this cap take most of a day: longer than an outage that pages."""

RUN = "forgekeeper_run"
"""The option in which a child's message says which run has sent it."""

Answer = TypeVar("Answer")

log = structlog.get_logger(__name__)
_current: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


class LostRun(Exception):
    """The run was taken from us: we were silent for too long, and another may be at it."""


class NoAttempt(Exception):
    """A batch was called outside a run; use `forgekeeper run` or `forgekeeper send`."""


def identity() -> str:
    """Name this process the way the ledger and the logs do: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def current() -> Attempt:
    """Return the attempt that this thread is making; raise `NoAttempt` outside one."""
    attempt = _current.get()
    if attempt is None:
        raise NoAttempt(NoAttempt.__doc__)
    return attempt


class Call(NamedTuple):
    """A child to work on."""

    actor: Actor[..., None]
    message_id: str
    args: tuple[Any, ...]


class Attempt:
    """A started run of *batch*."""

    def __init__(self, batch: str, run: Started, settings: Settings) -> None:
        self.batch = batch
        self.run = run
        self.outcome: Any = None
        self.blocked: Blocked | None = None
        self.skipped: str | None = None
        self.budget: Deadline | None = None
        self.settings = settings
        self.children: list[Call] | None = None
        self._pace = settings.pace(batch)
        self._retry_after = settings.retry_after
        self._dead_after = settings.dead_after.total_seconds()
        self._alive = self._began = time.monotonic()
        self._taken = False
        self._growth: Growth | None = None

    def enter(self) -> None:
        """Make this the thread's attempt, and put its facts on every log line."""
        _current.set(self)
        structlog.contextvars.bind_contextvars(
            batch=self.batch,
            run=self.run.id,
            attempt=self.run.attempt,
            tick=self.run.tick and self.run.tick.isoformat(),
            message_id=str(self.run.id),
            worker=identity(),
        )
        log.info("run started")

    def leave(self) -> None:
        """End being the thread's attempt."""
        _current.set(None)
        structlog.contextvars.clear_contextvars()

    def begin(self, outcome: Any) -> None:
        """Let *outcome* be what the run comes to; whatever becomes of the run, what it holds by then was done."""
        self.outcome = outcome
        self._growth = Growth(self.batch, outcome)

    def deadline(self, budget: timedelta) -> Deadline:
        """Start the batch's budget; at each of its safe points what the outcome has grown by is counted."""
        self.budget = Deadline(budget, safe_point=self.check, told=self.count, pace=self._pace)
        return self.budget

    def count(self) -> None:
        """Count what the outcome has grown by since it was counted last."""
        if self._growth is not None:
            self._growth.count()

    def fan_out(self, actor: Actor[..., None], keyed_args: Sequence[Keyed]) -> Enqueued:
        """Send *actor* a message for each pair of id and arguments, unless it is on its way already.

        Where *children* are collected, the caller works on them himself, after this run.
        """
        if self.children is None:
            assert isinstance(actor.broker, RedisBroker)
            return enqueue_many(
                actor.broker, actor, keyed_args, limit_depth=self.settings.queue_limit, options={RUN: self.run.id}
            )
        self.children += [Call(actor, message_id, args) for message_id, args in keyed_args]
        return Enqueued(len(keyed_args))

    def why_skipped(self) -> str | None:
        """Name the reason why nothing was done, None where nothing kept it from its work."""
        return self.skipped if self.blocked is None else self.blocked.reason

    def result(self) -> dict[str, Any]:
        """Return the outcome's fields as they are now, and why nothing was done if nothing was to be."""
        fields = {} if self.outcome is None else asdict(self.outcome)
        if self.blocked is not None:
            return fields | {"skipped": self.blocked.reason, "blocked": storable(str(self.blocked))}
        return fields | ({"skipped": self.skipped} if self.skipped else {})

    def sign_of_life(self, *, ours: bool) -> None:
        """Take note of what a heartbeat found."""
        self._alive = time.monotonic()
        self._taken = self._taken or not ours

    def check(self) -> None:
        """Raise `LostRun` when the run was taken from us, or must be assumed to be."""
        if self._taken or time.monotonic() - self._alive > self._dead_after:
            raise LostRun(f"run {self.run.id} of {self.batch} was taken from attempt {self.run.attempt}")

    def succeed(self) -> str | None:
        """Close the run with the batch's outcome, or as blocked; return its new state, None when it is lost."""
        result, blocked = self.result(), self.blocked
        if blocked is None:
            ours = _written(lambda: JobRun.succeed(self.run, result))
        else:
            reason, sentence = blocked.reason, storable(str(blocked))
            ours = _written(lambda: JobRun.block(self.run, result, reason=reason, sentence=sentence))
        if not ours:
            log.warning("run lost", seconds=self.seconds(), **result)
            return None
        if blocked is not None:
            log.error("run blocked", seconds=self.seconds(), **result)
            return "blocked"
        log.info("run finished", seconds=self.seconds(), **result)
        return "succeeded"

    def fail(self, error: BaseException, *, final: bool) -> str | None:
        """Let the run be tried again later, unless *final*; return its new state, None when it is lost."""
        delay = backoff(self.run.failures, first=self._retry_after)
        retries, result = 0 if final else MAX_RETRIES, self.result()
        state = None
        if not isinstance(error, LostRun):
            state = _written(lambda: JobRun.fail(self.run, describe(error), result, delay=delay, retries=retries))
        if state is None:
            log.warning("run lost", seconds=self.seconds(), **result)
        else:
            retry_in = round(delay.total_seconds(), 1) if state == "enqueued" else None
            # Where somebody watches, the command says what went wrong; its trace is for those who look for it.
            trace = error if not final or log.is_enabled_for(logging.DEBUG) else None
            log.error("run failed", seconds=self.seconds(), state=state, retry_in=retry_in, exc_info=trace, **result)
        return state

    def seconds(self) -> float:
        """Return how long it has taken so far."""
        return round(time.monotonic() - self._began, 3)


def _written(write: Callable[[], Answer]) -> Answer:
    try:
        return write()
    except pw.PeeweeException:
        if reachable():
            raise
        # Perhaps only this connection has gone: a run that can say how it ended is not lost with its worker.
        release()
        database.connect()
        return write()


def backoff(failures: int, *, first: timedelta) -> timedelta:
    """Return how long to wait after so many earlier failures: *first*, doubled each time, with jitter."""
    jitter = random.uniform(1.0, 1.5)  # noqa: S311, spreads load, guards nothing
    delay: timedelta = first * 2 ** min(failures, 20) * jitter
    return min(delay, LONGEST_RETRY)


def describe(error: BaseException) -> str:
    """Put an exception into one line for the ledger and the dead letters."""
    # Masked before it is cut: of half a secret nobody knows that it is one.
    return storable(f"{type(error).__name__}: {text_of(error)}".splitlines()[0])[:500]


def storable(line: str) -> str:
    """Write a line as every server can keep it, and everybody may read it."""
    # PostgreSQL refuses a NUL, and both refuse the half characters by which Python writes bytes that are no
    # text: then the run or the message could not be ended.
    return clean(line)

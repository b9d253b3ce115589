"""A child: one message of a fan-out, as it is worked on."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import peewee as pw
import structlog

from forgekeeper.batches import spec
from forgekeeper.events import ChildEnded, emit
from forgekeeper.identity import identity
from forgekeeper.runs.attempt import NoAttempt, storable
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.growth import Growth
from forgekeeper.settings import Settings
from metrics.redaction import describe

log = structlog.get_logger(__name__)
_current: ContextVar[Child | None] = ContextVar("child", default=None)


def current() -> Child:
    """Return the child that this thread works on; raise `NoAttempt` outside one."""
    child = _current.get()
    if child is None:
        raise NoAttempt(NoAttempt.__doc__)
    return child


class Child:
    """One message of a fan-out: its log lines, its outcome, and whether there is more to do.

    A child holds no row: what it works on is claimed where the data is, so losing it, or
    working on it twice, is harmless.  *run* is the one that has sent it, where that is known.
    """

    def __init__(self, actor: str, message_id: str, settings: Settings, *, run: int | None = None) -> None:
        self.settings = settings
        self.message_id = message_id
        self.outcome: Any = None
        self.blocked: Blocked | None = None
        self.more = False
        self._actor = actor
        self.run = run
        self._began = time.monotonic()
        self._growth: Growth | None = None

    def enter(self) -> None:
        """Make this the thread's child, and put its facts on every log line."""
        _current.set(self)
        structlog.contextvars.bind_contextvars(
            batch=self._actor, run=self.run, message_id=self.message_id, worker=identity()
        )
        log.info("child started")

    def leave(self, error: BaseException | None) -> None:
        """End being the thread's child; say what came of it."""
        seconds, result = round(time.monotonic() - self._began, 3), self.result()
        if error is not None:
            log.error("child failed", seconds=seconds, exc_info=error, **result)
        elif self.blocked is not None:
            log.error("child blocked", seconds=seconds, **result)
            self._note(self.blocked)
        else:
            log.info("child finished", seconds=seconds, more=self.more, **result)
        self.count()
        skipped = self.blocked.reason if self.blocked is not None else None
        emit(ChildEnded(self._actor, seconds, self.outcome, error, skipped))
        _current.set(None)
        structlog.contextvars.clear_contextvars()

    def _note(self, blocked: Blocked) -> None:
        """Let the batch be seen to be blocked; what cannot be written now is written by the next child."""
        declared = spec(self._actor)
        if declared is None or declared.parent is None:
            return
        try:
            Batch.child_blocked(declared.parent, reason=blocked.reason, sentence=storable(str(blocked)))
        except pw.PeeweeException as error:
            log.warning("block not noted", error=describe(error))

    def begin(self, outcome: Any) -> None:
        """Let *outcome* be what the child comes to; whatever becomes of it, what it holds by then was done."""
        self.outcome = outcome
        self._growth = Growth(self._actor, outcome)

    def deadline(self, budget: timedelta, *, pace: float | None) -> Deadline:
        """Start the child's budget; at each of its safe points what the outcome has grown by is counted."""
        return Deadline(budget, told=self.count, pace=pace)

    def count(self) -> None:
        """Count what the outcome has grown by since it was counted last."""
        if self._growth is not None:
            self._growth.count()

    def result(self) -> dict[str, Any]:
        """Return the outcome's fields as they are now, and why nothing was done if nothing was to be."""
        fields = {} if self.outcome is None else asdict(self.outcome)
        if self.blocked is not None:
            fields |= {"skipped": self.blocked.reason, "blocked": storable(str(self.blocked))}
        return fields

"""What happens to runs, children, records and messages, told where it happens to all who have subscribed.

Subscribers are called at once, in the thread in which it happens, with the database connection that it has.  One
that raises costs a line, never the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple

import structlog

log = structlog.get_logger(__name__)


class RunSkipped(NamedTuple):
    """A run did not begin."""

    batch: str
    reason: str


class RunStarted(NamedTuple):
    """An attempt has begun; *tick* is None where a person has sent the run."""

    batch: str
    tick: datetime | None
    attempt: int


class OutcomeGrew(NamedTuple):
    """The outcome of a batch or child has grown by so much, field by field: that much is done."""

    batch: str
    by: Mapping[str, int]


class RunEnded(NamedTuple):
    """An attempt has ended; *state* is what its row has become, None where that is not ours any more."""

    batch: str
    seconds: float
    outcome: object
    error: BaseException | None
    state: str | None
    skipped: str | None


class ChildEnded(NamedTuple):
    """A child has ended."""

    child: str
    seconds: float
    outcome: object
    error: BaseException | None
    skipped: str | None = None


class RecordFailed(NamedTuple):
    """A record failed alone and is passed over."""

    batch: str
    record: str
    kind: str


class DeadLettered(NamedTuple):
    """A message of that actor, which may be anything, was moved to the dead letters."""

    actor: str


class LineWritten(NamedTuple):
    """A log line of that level was written."""

    level: str


Event = RunSkipped | RunStarted | OutcomeGrew | RunEnded | ChildEnded | RecordFailed | DeadLettered | LineWritten
Subscriber = Callable[[Event], None]
_subscribers: list[Subscriber] = []


def subscribe(subscriber: Subscriber) -> None:
    """Call *subscriber* with every event from now on; idempotent."""
    if subscriber not in _subscribers:
        _subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Call it no more."""
    if subscriber in _subscribers:
        _subscribers.remove(subscriber)


def emit(event: Event) -> None:
    """Tell all subscribers."""
    for subscriber in tuple(_subscribers):
        try:
            subscriber(event)
        except Exception:  # a subscriber is no part of the run
            # No line about a line.
            if not isinstance(event, LineWritten):
                log.exception("subscriber failed", about=type(event).__name__)

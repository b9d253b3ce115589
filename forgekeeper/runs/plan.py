"""What becomes of a batch's ticks: decided here, carried out by `reconcile`.

Nothing is asked and nothing is changed: the same arguments give the same decisions, so any
number of schedulers may decide at once, and the first to claim it has the tick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Literal

from forgekeeper.settings.cron import Cron

MISFIRE_GRACE = timedelta(minutes=1)
"""A tick found later than this was missed; the documents promise a minute at most."""
REMEMBERED = 100
"""How many older ticks get a row each after an outage; the ledger need not list a week of minutes."""
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Policy:
    """What a batch wants done about ticks that nobody claimed in time.

    With *catch_up* ``once`` the newest runs late, unless it is older than *window*; with ``skip`` it does not.
    *tolerance* is how far a scheduler's clock may be ahead without its hint being turned away.
    """

    catch_up: Literal["once", "skip"]
    window: timedelta
    tolerance: timedelta
    misfire_grace: timedelta = MISFIRE_GRACE
    remembered: int = REMEMBERED


@dataclass(frozen=True)
class Claim:
    """Run the tick; where a pause or an open run forbids that, it is skipped."""

    tick: datetime
    reason: Literal["catch_up"] | None = None


@dataclass(frozen=True)
class Record:
    """Close the ticks, newest first, without a run."""

    ticks: tuple[datetime, ...]
    state: Literal["coalesced", "missed"]
    reason: Literal["skip"] | None = None


@dataclass(frozen=True)
class Decisions:
    """What becomes of ticks that have no row: of the one that is due, and of those before it, the newest first."""

    newest: Claim | Record | None = None
    older: tuple[Record, ...] = ()


def plan(
    now: datetime, known: datetime, schedule: Cron, policy: Policy, *, due_hint: datetime | None = None
) -> Decisions:
    """Decide about every tick later than *known*, the newest that has a row, and due *now*.

    *due_hint* is the tick that a scheduler's own clock says is due; it is believed up to the policy's tolerance
    before *now* gets there, and no further.  After a long outage the oldest ticks are not decided about at all.
    """
    due = schedule.newest(now)
    if due_hint is not None and due < due_hint <= now + policy.tolerance:
        due = due_hint
    if due <= known:
        return Decisions()
    late = due < now - policy.misfire_grace
    skips = late and policy.catch_up == "skip"
    horizon = now - policy.window
    older = islice(_before(due, known, schedule), policy.remembered)
    return Decisions(_of_newest(due, horizon, late=late, skips=skips), _of_older(tuple(older), horizon, skips=skips))


def _of_newest(due: datetime, horizon: datetime, *, late: bool, skips: bool) -> Claim | Record:
    if skips:
        return Record((due,), "missed", "skip")
    if late and due <= horizon:
        return Record((due,), "missed")
    return Claim(due, "catch_up" if late else None)


def _of_older(ticks: tuple[datetime, ...], horizon: datetime, *, skips: bool) -> tuple[Record, ...]:
    """Let the newest tick do the work of those within the window, unless it is skipped too."""
    within = tuple(tick for tick in ticks if tick > horizon)
    recent = Record(within, "missed", "skip") if skips else Record(within, "coalesced")
    return tuple(record for record in (recent, Record(ticks[len(within) :], "missed")) if record.ticks)


def _before(due: datetime, known: datetime, schedule: Cron) -> Iterator[datetime]:
    """Yield the ticks between *known* and *due*, newest first."""
    tick = due
    while (tick := schedule.newest(tick - MICROSECOND)) > known:
        yield tick

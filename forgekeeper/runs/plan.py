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

CLOCK_TOLERANCE = timedelta(seconds=2)
"""How far a scheduler's clock may be ahead without its tick being turned away."""
MISFIRE_GRACE = timedelta(minutes=1)
"""A tick found later than this was missed; the documents promise a minute at most."""
REMEMBERED = 100
"""How many older ticks get a row each after an outage; the ledger need not list a week of minutes."""
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Policy:
    """What a batch wants done about ticks that nobody claimed in time.

    With *catch_up* ``once`` the newest runs late, unless it is older than *window*; with ``skip`` it does not.
    """

    catch_up: Literal["once", "skip"]
    window: timedelta


@dataclass(frozen=True)
class Decision:
    """What becomes of ticks, the newest first: one is claimed, unless a hold or an open run forbids that."""

    ticks: tuple[datetime, ...]
    state: Literal["claimed", "coalesced", "missed"]
    reason: Literal["catch_up", "skip"] | None = None


def plan(
    now: datetime, known: datetime, schedule: Cron, policy: Policy, *, due_hint: datetime | None = None
) -> list[Decision]:
    """Decide about every tick later than *known*, the newest that has a row, and due *now*; the newest comes first.

    *due_hint* is the tick that a scheduler's own clock says is due; it is believed up to `CLOCK_TOLERANCE`
    before *now* gets there, and no further.  After a long outage the oldest ticks are not decided about at all.
    """
    due = schedule.newest(now)
    if due_hint is not None and due < due_hint <= now + CLOCK_TOLERANCE:
        due = due_hint
    if due <= known:
        return []
    late, horizon = due < now - MISFIRE_GRACE, now - policy.window
    older = list(islice(_before(due, known, schedule), REMEMBERED))
    within = tuple(tick for tick in older if tick > horizon)
    if late and policy.catch_up == "skip":
        decisions = [Decision((due,), "missed", "skip"), Decision(within, "missed", "skip")]
    elif late and due <= horizon:
        decisions = [Decision((due,), "missed")]
    else:
        # The newest tick does the work of those within the window.
        decisions = [Decision((due,), "claimed", "catch_up" if late else None), Decision(within, "coalesced")]
    decisions.append(Decision(tuple(older[len(within) :]), "missed"))
    return [decision for decision in decisions if decision.ticks]


def _before(due: datetime, known: datetime, schedule: Cron) -> Iterator[datetime]:
    """Yield the ticks between *known* and *due*, newest first."""
    tick = due
    while (tick := schedule.newest(tick - MICROSECOND)) > known:
        yield tick

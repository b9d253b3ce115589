"""What ends a run before its work is done, besides its budget: a stop, a hold, a cancelled run, a limit.

All of it is in PostgreSQL, and asked there, at most once a second and before the next chunk: it works while Redis is
away, for every run and child on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from forgekeeper.batches import Declared
from forgekeeper.database import database
from forgekeeper.runs.ledger import Deleted
from forgekeeper.runs.totals import RunTotal
from forgekeeper.settings import Settings

Why = Literal["stopped", "held", "cancelled", "max_per_run", "max_per_day"]
INTERVAL = 1.0
"""Seconds between two questions: a stop is to work within five."""
BLOCK = 1_000
"""So many records an attempt reserves at once: each time all others wait for a moment."""
ASK = """
    select case when stopped_since is not null then 'stopped' when held_since is not null then 'held'
        when exists (select from job_runs where id = %(run)s and batch = %(batch)s and cancelled_at is not null)
        then 'cancelled' end
    from batches where name = %(batch)s
"""


class Limits(NamedTuple):
    """How much runs may delete: records and bytes, each run and each day (UTC); None: as much as there is."""

    per_run: int | None = None
    per_day: int | None = None
    bytes_per_run: int | None = None
    bytes_per_day: int | None = None


class Brakes:
    """The brakes of one attempt at a run, or at a child of it."""

    def __init__(
        self,
        declared: Declared,
        settings: Settings,
        outcome: object,
        run: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._declared = declared
        self._batch = declared.batch.name
        self._outcome = outcome
        self._run = run or 0
        self._limits = limits_of(declared, settings)
        self._limited = self._limits != Limits()
        self._clock = clock
        self._asked = -INTERVAL
        self._left = 0
        self._told = Deleted()
        self._why: Why | None = None

    def why(self, *, now: bool = False) -> Why | None:
        """Say why the attempt has to end; once it has to, it has.  Asked of PostgreSQL once a second, or *now*."""
        if self._why is None and (now or self._clock() - self._asked >= INTERVAL):
            row = database.execute_sql(ASK, {"batch": self._batch, "run": self._run}).fetchone()
            self._asked = self._clock()
            self._why = row and row[0]
        return self._why

    @property
    def reason(self) -> Why | None:
        """What was found so far."""
        return self._why

    def allowed(self, wanted: int) -> int:
        """Return how many of so many records the next chunk may have; none once a limit is reached."""
        if not self._limited or self._why is not None:
            return 0 if self._why else wanted
        left = self._left - (self._deleted().records - self._told.records)
        if left < wanted:
            self._reserve(max(wanted, BLOCK))
            left = self._left
        return min(wanted, max(0, left))

    def expect(self, records: int) -> None:
        """Let this run delete so many records at most, whatever the settings say beyond that."""
        per_run = records if self._limits.per_run is None else min(records, self._limits.per_run)
        self._limits, self._limited = Limits(per_run, *self._limits[1:]), True

    def end(self, *, child: bool) -> None:
        """Give back what was reserved and not used; write down what a *child* has deleted: it has no row to close."""
        if child:
            self._tell()
        unused = self._left - (self._deleted().records - self._told.records)
        if self._limited and unused > 0:
            RunTotal.add(self._batch, self._run, reserved=-unused)

    def untold(self) -> Deleted:
        """Return what was deleted and is not written down yet: whoever closes a run does that in the same statement."""
        deleted = self._deleted()
        return Deleted(deleted.records - self._told.records, deleted.bytes - self._told.bytes)

    def _tell(self) -> None:
        grown = self.untold()
        if grown != Deleted():
            RunTotal.add(self._batch, self._run, records=grown.records, bytes=grown.bytes)
            self._told = self._deleted()
            self._left -= grown.records if self._limited else 0

    def _reserve(self, wanted: int) -> None:
        with database.atomic():
            RunTotal.lock(self._batch)
            self._tell()
            used, limits = RunTotal.used(self._batch, self._run), self._limits
            free = [
                ("max_per_run", limits.per_run, used.run - self._left, wanted),
                ("max_per_day", limits.per_day, used.day - self._left, wanted),
                ("max_per_run", limits.bytes_per_run, used.run_bytes, None),
                ("max_per_day", limits.bytes_per_day, used.day_bytes, None),
            ]
            granted = wanted
            for name, limit, already, most in free:
                room = None if limit is None else max(0, limit - already)
                if room == 0:
                    self._why = name  # type: ignore[assignment]
                    granted = 0
                elif room is not None and most is not None:
                    granted = min(granted, room)
            RunTotal.add(self._batch, self._run, reserved=granted - self._left)
        self._left = granted

    def _deleted(self) -> Deleted:
        found: Any = vars(self._outcome)
        return Deleted(
            sum(found[field] for field in self._declared.counted),
            sum(found[field] for field in self._declared.counted_bytes),
        )


def limits_of(declared: Declared, settings: Settings) -> Limits:
    """Return the limits of the batch, which are its children's, too; of a parent that deletes nothing itself, none."""
    if not declared.counted:
        return Limits()
    return Limits(*settings.limits(declared.batch.name))

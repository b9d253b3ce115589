"""What ends a run before its work is done, besides its budget: a stop, a hold, a cancelled run, a limit.

All of it is in PostgreSQL, and asked there, at most once a second and before the next chunk: it works while Redis is
away, for every run and child on every machine.

Limits are exact, however many children delete at once: an attempt reserves what it may delete before it does.  It
reserves many records at a time, fewer as the limit comes near, and gives back what it has not used; what it had
reserved when it was killed stays used up, as nobody knows what it has done with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any, Literal, NamedTuple

from forgekeeper.batches import Declared
from forgekeeper.database import database
from forgekeeper.runs.holds import ENDS, WHY
from forgekeeper.runs.totals import NONE, Amount, RunTotal, Used
from forgekeeper.settings import Settings

Why = Literal["stopped", "held", "cancelled", "max_per_run", "max_per_day"]
INTERVAL = 1.0
"""Seconds between two questions: a stop is to work within five."""
BLOCK = Amount(1_000, 2**30)
"""So much an attempt reserves at once, where a limit is far: each time all others wait for a moment."""
SHARES = 8
"""It reserves no more than this part of what is free, unless its chunk needs more: others want some, too."""
ASK = f"""
    select coalesce(({WHY.format("%(batch)s", ENDS)}), case when exists (
            select from job_runs where id = %(run)s and batch = %(batch)s and cancelled_at is not null
        ) then 'cancelled' end),
        (select min(expect) from run_totals where batch = %(batch)s and run = %(run)s),
        case when released_at > clock_timestamp() - interval '24 hours'
            and (released_run is null or released_run = %(run)s) then released_expect end
    from (select) as one left join batches on name = %(batch)s
"""


class Limits(NamedTuple):
    """How much runs may delete: records and bytes, each run and each day (UTC); None: as much as there is."""

    per_run: int | None = None
    per_day: int | None = None
    bytes_per_run: int | None = None
    bytes_per_day: int | None = None

    @property
    def of_records(self) -> bool:
        """Whether records are limited."""
        return self.per_run is not None or self.per_day is not None

    @property
    def of_bytes(self) -> bool:
        """Whether bytes are."""
        return self.bytes_per_run is not None or self.bytes_per_day is not None


UNLIMITED = Limits()


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
        self._limits = Limits(*settings.limits(self._batch))
        self._clock = clock
        self._asked = -INTERVAL
        self._left = NONE
        self._told = NONE
        self._day: date | None = None
        self._day_ends = 0.0
        self._why: Why | None = None
        self._begun = False
        self.released: int | None = None
        """So much a release that nobody has used lets this run delete, if it is the next run of its batch."""

    def why(self, *, now: bool = False) -> Why | None:
        """Say why the attempt has to end; once it has to, it has.  Asked of PostgreSQL once a second, or *now*."""
        if self._why is None and (now or self._clock() - self._asked >= INTERVAL):
            row = database.execute_sql(ASK, {"batch": self._batch, "run": self._run}).fetchone()
            self._asked = self._clock()
            self._why = row[0]
            self._lower(row[1])
            self.released = row[2]
        return self._why

    @property
    def reason(self) -> Why | None:
        """What was found so far."""
        return self._why

    def allowed(self, wanted: int, *, size: int = 1) -> int:
        """Return how many of so many records the next chunk may have; none once a limit is reached.

        Where bytes are limited it may have `allowed_bytes`, too: at least *size*, if so many are left.
        """
        # Before the first chunk what was heard earlier does not count: there were checks, which take their time.
        self.why(now=not self._begun)
        self._begun = True
        if self._why is not None or self._limits == UNLIMITED:
            return 0 if self._why else wanted
        limits, unused = self._limits, self._unused()
        short = (limits.of_records and unused.records < wanted) or (limits.of_bytes and unused.bytes < size)
        if short or self._lapsed():
            self._reserve(Amount(wanted, size))
        if self.reason is not None:
            return 0
        return min(wanted, self._unused().records) if limits.of_records else wanted

    @property
    def allowed_bytes(self) -> int | None:
        """How many bytes the chunk that was just allowed may have, None where nothing limits them."""
        return self._unused().bytes if self._limits.of_bytes else None

    def room(self) -> int | None:
        """Return how many records the limits leave to this run and day, None where there are none."""
        limits = self._limits
        if not limits.of_records:
            return None
        used = RunTotal.used(self._batch, self._run)
        return _least(_free(limits.per_run, used.run), _free(limits.per_day, used.day))

    def expect(self, records: int) -> None:
        """Let this run, and its children, delete so many records at most, whatever the settings say beyond that."""
        RunTotal.limit(self._batch, self._run, records)
        self._lower(records)

    def end(self, *, closed: bool = False) -> None:
        """Write down what was deleted, and give back what was reserved and not used.

        What is *closed* afterwards, a run, has what nothing limits written down with that, in the same statement.
        """
        if not closed or self._limits != UNLIMITED:
            self._tell()
        if self._left != NONE:
            self._add(reserved=Amount(-self._left.records, -self._left.bytes))
            self._left = NONE

    def untold(self) -> Amount:
        """Return what was deleted and is not written down yet."""
        deleted = self._deleted()
        return Amount(deleted.records - self._told.records, deleted.bytes - self._told.bytes)

    def _lower(self, expected: int | None) -> None:
        """Let the limit of the run be no more than what is *expected* of it."""
        if expected is not None and self._declared.batch.deletes:
            per_run, *others = self._limits
            self._limits = Limits(_least(per_run, expected), *others)

    def _lapsed(self) -> bool:
        """Say whether the day is over on which something was reserved; then its rest is of no use."""
        return self._day is not None and self._clock() >= self._day_ends

    def _unused(self) -> Amount:
        """Return what is left of what was reserved, after what was deleted and not told of yet."""
        done = self.untold()
        return Amount(self._left.records - done.records, self._left.bytes - done.bytes)

    def _tell(self) -> None:
        """Write down what was deleted since the last time; it is used up of what was reserved."""
        deleted, rest, grown = self._deleted(), self._unused(), self.untold()
        if grown == NONE:
            return
        rest = Amount(max(0, rest.records), max(0, rest.bytes))
        used = Amount(rest.records - self._left.records, rest.bytes - self._left.bytes)
        self._add(grown, used)
        self._told, self._left = deleted, rest

    def _reserve(self, wanted: Amount) -> None:
        """Reserve anew: at least what is *wanted*, if so much is left; where nothing is, say which limit it was."""
        with database.atomic():
            RunTotal.lock(self._batch)
            self.end()
            used = RunTotal.used(self._batch, self._run)
            self._day, self._day_ends = used.today, self._clock() + used.seconds
            records = self._grant("records", wanted.records, used)
            size = self._grant("bytes", wanted.bytes, used)
            if self._why is None:
                self._add(reserved=Amount(records, size))
                self._left = Amount(records, size)

    def _grant(self, of: Literal["records", "bytes"], wanted: int, used: Used) -> int:
        limits = self._limits
        if of == "records":
            free = [_free(limits.per_run, used.run), _free(limits.per_day, used.day)]
            most, least = BLOCK.records, 1
        else:
            free = [_free(limits.bytes_per_run, used.run_bytes), _free(limits.bytes_per_day, used.day_bytes)]
            # Not even the next one fits.
            most, least = BLOCK.bytes, wanted
        room = _least(*free)
        if room is None:
            return 0
        if room < least:
            self._why = "max_per_run" if free[0] == room else "max_per_day"
        return min(room, max(wanted, min(most, room // SHARES)))

    def _add(self, did: Amount = NONE, reserved: Amount = NONE) -> None:
        RunTotal.add(self._batch, self._run, did, reserved, day=self._day)

    def _deleted(self) -> Amount:
        found: Any = vars(self._outcome)
        return Amount(
            sum(found[field] for field in self._declared.counted),
            sum(found[field] for field in self._declared.counted_bytes),
        )


def _free(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)

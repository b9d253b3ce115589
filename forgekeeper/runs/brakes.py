"""What ends a run before its work is done, besides its budget: a stop, a hold, a cancelled run, a limit.

All of it is in PostgreSQL, and asked there, at most once a second and before the next chunk: it works while Redis is
away, for every run and child on every machine.

Limits are those of the batch: a child counts to the run in force, which is the newest of its batch, whichever has sent
it; and it ends when that one is cancelled, or the one that has sent it.

Limits are exact, however many children delete at once: an attempt reserves what it may delete before it does.  It
reserves many records at a time, fewer as the limit comes near, and gives back what it has not used; what it had
reserved when it was killed stays used up, as nobody knows what it has done with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any, Literal, NamedTuple

from forgekeeper.batches import ChildSpec, Declared
from forgekeeper.database import database
from forgekeeper.database.writes import writing
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
# Until a run has begun after a release, children of earlier ones stay held.
ASK = f"""
    with force as (
        select case when %(child)s then (
            select id from job_runs where batch = %(batch)s and started_at is not null order by id desc limit 1
        ) end as run
    )
    select coalesce(({WHY.format("%(batch)s", ENDS)}), case
            when %(child)s and released_at is not null and released_run is null then 'held'
            when exists (
                select from job_runs where id in (run, %(run)s) and batch = %(batch)s and cancelled_at is not null
            ) then 'cancelled'
        end),
        coalesce(run, %(run)s), released_at is not null, released_at is not null and released_expect is not null
    from force left join batches on name = %(batch)s
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
        self._sender = self._run = run or 0
        self._child = isinstance(declared, ChildSpec)
        self._limits = Limits(*settings.limits(self._batch))
        self._clock = clock
        self._asked = -INTERVAL
        self._left = NONE
        self._told = NONE
        self._day: date | None = None
        self._day_ends = 0.0
        self._why: Why | None = None
        self._begun = False
        self._bound = False
        self.released = False
        """Whether something of the batch was released; how much goes by that is limited if the release says so."""

    def why(self, *, now: bool = False) -> Why | None:
        """Say why the attempt has to end; once it has to, it has.  Asked of PostgreSQL once a second, or *now*."""
        if self._why is None and (now or self._clock() - self._asked >= INTERVAL):
            values = {"batch": self._batch, "run": self._sender, "child": self._child}
            self._why, run, self.released, bound = database.execute_sql(ASK, values).fetchone()
            self._asked = self._clock()
            self._bound = bound and self._declared.batch.deletes
            if run != self._run:
                self.end()
                self._run = run
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
        if self._why is not None or not self._limited:
            return 0 if self._why else wanted
        limits, unused = self._limits, self._unused()
        short = (self._of_records and unused.records < wanted) or (limits.of_bytes and unused.bytes < size)
        if short or self._lapsed():
            self._reserve(Amount(wanted, size))
        if self.reason is not None:
            return 0
        return min(wanted, self._unused().records) if self._of_records else wanted

    @property
    def allowed_bytes(self) -> int | None:
        """How many bytes the chunk that was just allowed may have, None where nothing limits them."""
        return self._unused().bytes if self._limits.of_bytes else None

    def end(self, *, closed: bool = False) -> None:
        """Write down what was deleted, and give back what was reserved and not used.

        What is *closed* afterwards, a run, has what nothing limits written down with that, in the same statement.
        """
        if not closed or self._limited:
            self._tell()
        if self._left != NONE:
            self._add(reserved=Amount(-self._left.records, -self._left.bytes))
            self._left = NONE

    def untold(self) -> Amount:
        """Return what was deleted and is not written down yet."""
        deleted = self._deleted()
        return Amount(deleted.records - self._told.records, deleted.bytes - self._told.bytes)

    @property
    def _of_records(self) -> bool:
        return self._limits.of_records or self._bound

    @property
    def _limited(self) -> bool:
        return self._limits != UNLIMITED or self._bound

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
        with writing():
            RunTotal.lock(self._batch)
            if self._child and self.why(now=True) is not None:
                return
            self.end()
            used = RunTotal.used(self._batch, self._run)
            self._day, self._day_ends = used.today, self._clock() + used.seconds
            self._bound = self._bound and used.released is not None
            records = self._grant("records", wanted.records, used)
            size = self._grant("bytes", wanted.bytes, used)
            if self._why is None:
                self._add(reserved=Amount(records, size))
                self._left = Amount(records, size)

    def _grant(self, of: Literal["records", "bytes"], wanted: int, used: Used) -> int:
        limits = self._limits
        if of == "records":
            of_run = _least(_free(limits.per_run, used.run), _left(used.released))
            free = [of_run, _free(limits.per_day, used.day)]
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
        with writing():
            RunTotal.add(self._batch, self._run, did, reserved, day=self._day)

    def _deleted(self) -> Amount:
        found: Any = vars(self._outcome)
        return Amount(
            sum(found[field] for field in self._declared.counted),
            sum(found[field] for field in self._declared.counted_bytes),
        )


def room(batch: str, settings: Settings, run: int, *, released: bool) -> int | None:
    """Return how many records limits, and what was *released*, leave to the run today; None where there are none."""
    limits = Limits(*settings.limits(batch))
    if not (limits.of_records or released):
        return None
    used = RunTotal.used(batch, run)
    left = _left(used.released) if released else None
    return _least(_free(limits.per_run, used.run), _free(limits.per_day, used.day), left)


def _free(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _left(released: int | None) -> int | None:
    return None if released is None else max(0, released)


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)

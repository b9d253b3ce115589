"""The guard of a run: reasons to end it early, and the limits of its deletions.

A run ends early at a stop, a hold or a limit, or if it is cancelled.  All of these are stored in PostgreSQL.  A run
reads them there at most once a second and before its next chunk, so they work for every run and child on every machine,
also while Redis is down.

Limits belong to the batch.  The deletions of a child count against the batch's newest run, whichever run sent the
child.  A child ends if the newest run or the run that sent it is cancelled.

No crash exceeds a limit.  An attempt commits a reservation before it deletes anything.  The transaction that deletes
takes the deleted records from the reservation and counts them (`docs/adr/0028`).  Far from a limit an attempt reserves
several chunks of rows at once; near a limit it reserves one chunk, so that others find the rest (`docs/adr/0055`).  At
its end, or if PostgreSQL refuses a statement, the attempt gives the rest back.  If the attempt is killed or hears no
answer, the rest stays used up until the limit's run or day is over: a chunk, or far from a limit at most
`MAX_CHUNKS_PER_RESERVATION` chunks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import peewee as pw

from forgekeeper.api.batches import ChildSpec, Declaration
from forgekeeper.api.records import Fields
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger.holds import KINDS_THAT_END_RUNS, SELECT_HOLD_STATE
from forgekeeper.ledger.limits import NO_AMOUNT, NO_USAGE, Amount, DeletionLimits, RunTotal, StopReason
from forgekeeper.platform.database import database, is_connected, sqlstate
from forgekeeper.platform.database.common_tables import CommonTable
from forgekeeper.platform.database.sessions import execute_prepared, write_transaction
from forgekeeper.platform.settings import PREFIX, Settings

GUARD_INTERVAL_SECONDS = 1.0
"""Seconds between two reads of stops, holds and releases.  A stop has to take effect within five seconds."""
MAX_CHUNKS_PER_RESERVATION = 64
"""Maximum chunks of rows that an attempt reserves at once.

A killed attempt leaves at most these used up.  A reservation takes as long as the deletion of 100 to 200 statuses, so
for 64 chunks it costs a few percent.
"""
RESERVATIONS_IN_REST = 20
"""Divisor of the rest of the limits: reservations for several chunks are no larger than the quotient."""
# *gone* has the number of deleted rows and their size.  Rows that were reserved without their sizes have no bytes left.
SETTLE_TOTALS = """
    update run_totals set records = records + gone.rows, bytes = bytes + gone.size,
        reserved = reserved - gone.rows, reserved_bytes = reserved_bytes - least(gone.size, %(limit_bytes)s)
    from ({gone}) as gone (rows, size)
    where batch = %(limit_batch)s and run = %(limit_run)s and day = %(limit_day)s
"""
# Until a run has begun after a release, children of earlier ones stay held.
SELECT_STOP_REASON = f"""
    with force as (
        select case when %(child)s then (
            select id from job_runs where batch = %(batch)s and started_at is not null order by id desc limit 1
        ) end as run
    )
    select coalesce(({SELECT_HOLD_STATE.format("%(batch)s", KINDS_THAT_END_RUNS)}), case
            when %(child)s and released_at is not null and released_run is null then 'held'
            when exists (
                select from job_runs where id in (run, %(run)s) and batch = %(batch)s and cancelled_at is not null
            ) then 'cancelled'
        end),
        coalesce(run, %(run)s), released_at is not null, released_at is not null and released_expect is not null
    from force left join batches on name = %(batch)s
"""


class LimitRefusal(NamedTuple):
    """The limit that can never admit a record, and a sentence for people."""

    reason: StopReason
    sentence: str


class Reservation(NamedTuple):
    """An amount that an attempt has reserved, when it did that, and the row of the totals that counts it."""

    amount: Amount = NO_AMOUNT
    reserved_at: float = -math.inf
    row: Mapping[str, Any] = MappingProxyType({})


class RunGuard:
    """The guard of an attempt at a run or a child: why it has to end, and what it may delete."""

    def __init__(self, declared: Declaration, settings: Settings, outcome: object, run: int | None) -> None:
        self._declared = declared
        self._batch = declared.batch.name
        self._outcome = outcome
        self._sender = self._run = run or 0
        self._child = isinstance(declared, ChildSpec)
        self._limits = DeletionLimits(*settings.deletion_limits(self._batch))
        self._asked = -GUARD_INTERVAL_SECONDS
        self._reserved = NO_AMOUNT
        self._reserved_at = -math.inf
        self._chunks = 1
        self._of_row: Mapping[str, Any] = {}
        self._noted = NO_AMOUNT
        self._carried = self._carried_bytes = 0
        self._begun = False
        self._bound = False
        self.stop_reason: StopReason | None = None
        """Why the attempt has to end; None while no reason is known."""
        self.has_release = False
        """Whether the batch has a release; if the release has an amount, it limits the deletions."""

    def continue_with(self, outcome: object) -> Self:
        """Count the outcome of the next child of the message from now on, too; return the guard."""
        self._carried += self._sum_fields(self._declared.counted_fields)
        self._carried_bytes += self._sum_fields(self._declared.counted_byte_fields)
        self._outcome = outcome
        return self

    def find_stop_reason(self, *, now: bool = False) -> StopReason | None:
        """Return why the attempt has to end; a reason never changes.

        Asks PostgreSQL once a second, or *now*.
        """
        if self.stop_reason is None and (now or time.monotonic() - self._asked >= GUARD_INTERVAL_SECONDS):
            values = {"batch": self._batch, "run": self._sender, "child": self._child}
            found = execute_prepared("stop_reason", SELECT_STOP_REASON, values).fetchone()
            self.stop_reason, run, self.has_release, bound = found
            self._asked = time.monotonic()
            self._bound = bound and self._declared.batch.deletes_records
            if run != self._run:
                self.count_unreserved()
                self._run = run
        return self.stop_reason

    @property
    def is_limited(self) -> bool:
        """Whether a limit or a release's amount applies: then each deletion needs a reservation."""
        return self._limits != DeletionLimits() or self._bound

    @property
    def bytes_left(self) -> int | None:
        """How many bytes are left of the reservation; None if bytes are not limited."""
        return self._reserved.bytes if self._limits.has_byte_limits else None

    def may_reserve_ahead(self, records: int) -> bool:
        """Return whether *records* are so few of what limits leave that a killed attempt may have reserved them all."""
        if not self.is_limited:
            return True
        left = self._limits.remaining_records(RunTotal.read_usage(self._batch, self._run)).amount
        return records * RESERVATIONS_IN_REST <= left

    def detach(self) -> Reservation:
        """Return the reservation, and have none until `attach`: meanwhile another chunk can be reserved."""
        detached = Reservation(self._reserved, self._reserved_at, self._of_row)
        self._reserved = NO_AMOUNT
        return detached

    def attach(self, reservation: Reservation) -> None:
        """Continue with a detached reservation."""
        self._reserved, self._reserved_at, self._of_row = reservation

    def count_allowed(self, wanted: int) -> int:
        """Return how many of the *wanted* records may be deleted now; 0 if the attempt has to end.

        Reserves nothing.  Gives back a reservation that is a second old, too small, or of an earlier run.
        """
        # Read before the first chunk, however new the last reading is: the checks before it take time.  A child asks
        # before each chunk of a reservation, too: a release may have begun since.
        self.find_stop_reason(now=not self._begun or (self._child and self._reserved != NO_AMOUNT))
        self._begun = True
        if self.stop_reason is not None:
            return 0
        if self._reserved.records >= wanted and self._is_reservation_new() and self._of_row["limit_run"] == self._run:
            return wanted
        self.give_back()
        if not self.is_limited:
            return wanted
        left = self._limits.remaining_records(RunTotal.read_usage(self._batch, self._run))
        if not left.amount:
            self.stop_reason = left.reason
        return min(wanted, left.amount)

    def find_refusal(self, wanted: Amount) -> LimitRefusal | None:
        """Return the limit that refuses *wanted* even before any deletion; None if no limit does.

        A limit of 0 refuses no record: it ends the run.
        """
        records, size = self._limits.remaining_records(NO_USAGE), self._limits.remaining_bytes(NO_USAGE)
        for much, left, kind in ((wanted.records, records, ""), (wanted.bytes, size, "bytes_")):
            if left.reason is not None and much > left.amount > 0:
                setting = f"{PREFIX}{left.reason}_{self._batch}".upper().replace("MAX_", f"MAX_{kind.upper()}", 1)
                what = "bytes" if kind else "records"
                sentence = (
                    f"its deletion counts as {much:,} {what}, and {setting} is {left.amount:,}: raise the setting"
                )
                return LimitRefusal(left.reason, sentence)
        return None

    @property
    def records_left(self) -> int | None:
        """How many records are left of the reservation, None if nothing limits them."""
        return self._reserved.records if self._reserved != NO_AMOUNT else None

    def reserve_chunk(self, records: int) -> int:
        """Return how many *records* of a chunk are reserved; reserve several chunks if the reservation is used up.

        The number of chunks doubles while each reservation is used up within a second.
        """
        if self._reserved.records < records:
            self._chunks = min(2 * self._chunks, MAX_CHUNKS_PER_RESERVATION) if self._is_reservation_new() else 1
            self.reserve(records, chunks=self._chunks)
        return min(records, self._reserved.records)

    def _is_reservation_new(self) -> bool:
        """Return whether the last reservation is less than a second old."""
        return time.monotonic() - self._reserved_at < GUARD_INTERVAL_SECONDS

    def reserve(
        self, records: int, size: int = 0, *, least: int = 0, least_records: int = 1, chunks: int = 1
    ) -> Amount:
        """Reserve up to *records* and *size* bytes; return the granted amount.

        Up to *chunks* times the records are reserved if limits leave far more.  Returns `NO_AMOUNT` if fewer than
        *least_records* or *least* bytes are left.  The reservation is committed when this returns.  It stays used up
        unless the transaction that deletes settles it.  Reservations that others may give back are not waited for: the
        next run can use them.
        """
        assert not database.in_transaction(), "a rollback would undo the reservation"
        self._reserved = NO_AMOUNT
        if not self.is_limited:
            return Amount(records, size)
        # The lock admits one child at a time.
        with write_transaction():
            RunTotal.lock_batch(self._batch)
            if self._child and self.find_stop_reason(now=True) is not None:
                return NO_AMOUNT
            used = RunTotal.read_usage(self._batch, self._run)
            self._bound = self._bound and used.released is not None
            left, left_bytes = self._limits.remaining_records(used), self._limits.remaining_bytes(used)
            if left.amount < least_records or left_bytes.amount < max(least, 1):
                self.stop_reason = self.stop_reason or (
                    left.reason if left.amount < least_records else left_bytes.reason
                )
                return NO_AMOUNT
            records *= max(1, min(chunks, left.amount // (RESERVATIONS_IN_REST * max(records, 1))))
            granted = Amount(min(records, left.amount), min(size, left_bytes.amount))
            RunTotal.add(self._batch, self._run, reserved=granted, day=used.today)
        self._reserved, self._reserved_at = granted, time.monotonic()
        self._of_row = {"limit_batch": self._batch, "limit_run": self._run, "limit_day": used.today}
        return granted

    def build_settled_table(self, source: str, *, size: str = "0") -> list[CommonTable]:
        """Return the common table ``settled``, which takes the rows of *source* from the reservation and counts them.

        *size* is an expression over *source*.  Empty if nothing is reserved.
        """
        if self._reserved == NO_AMOUNT:
            return []
        gone = f"select count(*), coalesce(sum({size}), 0)::bigint from {source}"
        return [CommonTable("settled", SETTLE_TOTALS.format(gone=gone))]

    def settlement_values(self) -> dict[str, Any]:
        """Return the values for a statement with `settled`."""
        return {**self._of_row, "limit_bytes": self._reserved.bytes}

    def settle(self, did: Amount, *, of_reserved: int | None = None) -> None:
        """Count the deleted amount *did*, and give the rest of the reservation back.

        Call it in the transaction that deletes.  It settles *of_reserved* of the reserved records, or all; the others
        stay used up.  Call `note_settled` after the commit.
        """
        if self._reserved != NO_AMOUNT:
            records, size = self._reserved if of_reserved is None else (of_reserved, did.bytes)
            settled = Amount(-min(records, self._reserved.records), -min(size, self._reserved.bytes))
            RunTotal.add(self._batch, self._of_row["limit_run"], did, settled, day=self._of_row["limit_day"])

    def note_settled(self, did: Amount, *, of_reserved: int | None = None) -> None:
        """Note the amount *did* after the commit of `settled` or `settle`."""
        if self._reserved == NO_AMOUNT:
            return
        self._noted = Amount(self._noted.records + did.records, self._noted.bytes + did.bytes)
        left = self._reserved
        self._reserved = (
            NO_AMOUNT
            if of_reserved is None
            else Amount(max(0, left.records - of_reserved), max(0, left.bytes - did.bytes))
        )

    def note_uncounted(self, records: int) -> None:
        """Note records that were deleted with others, and that no field of the outcome counts."""
        self._carried += records

    def give_back(self, of_reserved: int | None = None) -> None:
        """Give back *of_reserved* of the reserved records, or all; they were certainly not deleted."""
        if self._reserved != NO_AMOUNT and of_reserved != 0:
            with write_transaction():
                self.settle(NO_AMOUNT, of_reserved=of_reserved)
            self.note_settled(NO_AMOUNT, of_reserved=of_reserved)

    @contextmanager
    def giving_back(self, count_used: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Give the reservation back if the block fails and was certainly rolled back.

        *count_used* returns the number of records that may have been deleted all the same.
        """
        try:
            yield
        except Exception as error:
            if _is_rolled_back(error):
                with suppress(pw.PeeweeException):
                    self.give_back(max(0, self._reserved.records - count_used()))
            raise

    @contextmanager
    def giving_back_rest(self, *between: type[Exception]) -> Iterator[None]:
        """Give the rest of the reservation back after the block, also if it raises *between* two deletions."""
        with self.giving_back():
            try:
                yield
            except between:
                with suppress(pw.PeeweeException):
                    self.give_back()
                raise
        self.give_back()

    def settle_earlier(self, run: int | None, deleted: int, *, of_reserved: int) -> int:
        """Count records that an earlier attempt at a *run* deleted, of *of_reserved* reserved records.

        Call it in the transaction that closes these records, and call `note_earlier` after the commit.  Returns the
        number of counted records: 0 if that attempt reserved nothing because it had no limits.
        """
        return deleted if RunTotal.settle_earlier(self._batch, run or 0, deleted, of_reserved=of_reserved) else 0

    def note_earlier(self, deleted: int) -> None:
        """Note that *deleted* records of the outcome are already counted."""
        self._noted = Amount(self._noted.records + deleted, self._noted.bytes)

    def leave_used(self) -> None:
        """Leave the reservation used up: it is unknown how much of it was deleted.

        Nothing settles it later.
        """
        self._reserved = NO_AMOUNT

    def count_unreserved(self) -> None:
        """Count the deletions that were made without a limit."""
        noted = self._noted
        records = self._sum_fields(self._declared.counted_fields) + self._carried
        size = self._sum_fields(self._declared.counted_byte_fields) + self._carried_bytes
        grown = Amount(max(0, records - noted.records), max(0, size - noted.bytes))
        if grown != NO_AMOUNT:
            with write_transaction():
                RunTotal.add(self._batch, self._run, grown)
            self._noted = Amount(records, size)

    def _sum_fields(self, fields: Fields) -> int:
        found = vars(self._outcome)
        return sum(found[field] for field in fields)


def _is_rolled_back(error: Exception) -> bool:
    """Return whether the failed transaction has certainly changed nothing.

    That is certain if PostgreSQL reported the failure or the engine rolled back.  After any other error, such as a
    reply that Python cannot read, the transaction may be committed.
    """
    if isinstance(error, pw.PeeweeException):
        return sqlstate(error) is not None and is_connected()
    return isinstance(error, Blocked)

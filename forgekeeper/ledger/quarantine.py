"""Quarantine: failures that stop nothing else, until they end well or a person decides.

A record that fails alone, a child that fails or kills its worker, and an unreadable message have a row each.  The rows
are in PostgreSQL, so an emptied or silent Redis hides no failure.  Failures that documents keep in their own tables and
keys have no second row here: their batches declare them (`forgekeeper.api.inspection`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Literal

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.ledger.retry_delays import MAX_LOSSES, MAX_QUARANTINE_WAIT, MAX_RETRIES, QUARANTINE_UNTIL
from forgekeeper.platform.database import Base, BigIdentityField, database, default_sql
from forgekeeper.platform.database.arrays import format_array
from forgekeeper.platform.database.sessions import LAST_INSTANT, execute_prepared, write_transaction

QuarantineReason = Literal["record_failed", "child_failed", "worker_lost", "unreadable"]
REASONS_BY_KIND: dict[str, tuple[QuarantineReason, ...]] = {
    "record": ("record_failed",),
    "child": ("child_failed", "worker_lost"),
    "message": ("unreadable",),
}
FAILURES_BY_REASON: dict[QuarantineReason, int] = {"worker_lost": MAX_LOSSES, "unreadable": MAX_RETRIES + 1}
"""Number of failures that a failure with this reason counts for; all other failures count once."""
NO_RETRY_AT = pw.SQL("timestamptz 'infinity'")
UPSERT_FAILURE = f"""
    insert into quarantine as known (batch, record, key, reason, error, failures, since, failed_at, run, retry_at)
    select %(batch)s, %(record)s, %(key)s, %(reason)s, %(error)s, %(failures)s, at, at, %(run)s,
        {QUARANTINE_UNTIL.format(failures="%(failures)s", at="at")}
    from clock_timestamp() as at
    on conflict (batch, record, key) do update set
        failures = known.failures + excluded.failures, reason = excluded.reason, error = excluded.error,
        failed_at = excluded.failed_at, run = excluded.run,
        retry_at = {QUARANTINE_UNTIL.format(failures="(known.failures + excluded.failures)", at="excluded.failed_at")}
    returning retry_at = 'infinity'
"""
# A time that was written while the database's clock was ahead delays a record no longer than a right clock would.
IS_LEFT_OUT = f"""
    retry_at > clock_timestamp() and (
        retry_at = 'infinity' or retry_at <= clock_timestamp() + interval '{MAX_QUARANTINE_WAIT.total_seconds()} s'
    )
"""
SELECT_BAD_KEYS = f"select key, {IS_LEFT_OUT} from quarantine where batch = %(batch)s and record = %(record)s"
FROM_ROWS_OF_KEYS = "from quarantine where batch = %(batch)s and record = %(record)s and key = any(%(keys)s::text[])"
SELECT_FAILED_KEYS = f"select key, {IS_LEFT_OUT} {FROM_ROWS_OF_KEYS}"
COUNT_DEAD_LETTERS = """
    select case reason when 'unreadable' then 'message' else 'child' end, record, count(*) from quarantine
    where retry_at = 'infinity' and reason in ('child_failed', 'worker_lost', 'unreadable') group by 1, 2
"""


class Quarantined(Base):
    """A failed record, child or message, left out until *retry_at*.

    *record* is the kind of record or the child's name, *key* its id, *run* the run that sent it.  *retry_at* is
    infinity if a person has to decide.
    """

    grants = "worker: select, insert, update, delete; exporter: select"

    id = BigIdentityField()
    batch = pw.TextField()
    record = pw.TextField()
    key = pw.TextField()
    reason = pw.TextField()
    error = pw.TextField()
    failures = pw.IntegerField(constraints=default_sql("1"))
    since = DateTimeTZField()
    failed_at = DateTimeTZField()
    run = pw.BigIntegerField(null=True)
    retry_at = DateTimeTZField(constraints=default_sql("clock_timestamp()"))

    class Meta:
        table_name = "quarantine"
        indexes = ((("batch", "record", "key"), True),)

    @classmethod
    def oldest_first(cls, *, batch: str | None = None, kind: str | None = None) -> pw.ModelSelect[Quarantined]:
        """Select the rows in quarantine, or those rows with a batch or a kind."""
        query = cls.select().order_by(cls.since, cls.id)
        query = query if batch is None else query.where(cls.batch == batch)
        return query if kind is None else query.where(cls.reason.in_(REASONS_BY_KIND.get(kind, ())))

    @classmethod
    def select_after(cls, id: int, *, batch: str | None = None, kind: str | None = None) -> pw.ModelSelect[Quarantined]:  # noqa: A002
        """Select the same rows by id, beginning after *id*, to read any number in parts."""
        return cls.oldest_first(batch=batch, kind=kind).where(cls.id > id).order_by(cls.id)

    @property
    def kind(self) -> str:
        """The kind: ``record``, ``child`` or ``message``."""
        return next((kind for kind, reasons in REASONS_BY_KIND.items() if self.reason in reasons), "record")

    @property
    def next_retry_at(self) -> datetime | None:
        """When it is retried; None if a person has to decide."""
        return self.retry_at if self.retry_at < LAST_INSTANT else None


def record_failure(
    batch: str, record: str, key: str, error: str, *, reason: QuarantineReason, run: int | None = None
) -> bool:
    """Record a failure, which lengthens the wait; return whether a person has to decide now."""
    values = {"batch": batch, "record": record, "key": _clean_text(key), "reason": reason, "error": _clean_text(error)}
    with write_transaction():
        row = database.execute_sql(
            UPSERT_FAILURE, values | {"failures": FAILURES_BY_REASON.get(reason, 1), "run": run}
        ).fetchone()
    return bool(row[0])


def quarantine_poison(batch: str, child: str, key: str, *, starts: int, run: int | None) -> bool:
    """Put a child into quarantine if it has killed `MAX_LOSSES` processes; return whether it has.

    *starts* are its starts without an end, including the start that is about to happen.
    """
    if starts <= MAX_LOSSES:
        return False
    error = f"{MAX_LOSSES} processes died while they worked on it"
    record_failure(batch, child, key, error, reason="worker_lost", run=run)
    return True


def forget_failures(batch: str, record: str, keys: Iterable[str]) -> None:
    """Delete rows whose work has ended well or no longer exists."""
    which = _bind_keys(batch, record, keys)
    # Most keys have never failed: a child then only reads, and does not lock the table for writing.
    if execute_prepared("known_keys", f"select 1 {FROM_ROWS_OF_KEYS}", which).fetchone():
        with write_transaction():
            database.execute_sql(f"delete {FROM_ROWS_OF_KEYS}", which)


def find_failed_keys(batch: str, record: str, keys: Collection[str]) -> dict[str, bool]:
    """Return the *keys* that have failed, and whether to leave each out now.

    A key is left out while it waits for its retry or for a person.
    """
    # Prepared: a fan-out asks for each page of children.
    rows = execute_prepared("failed_keys", SELECT_FAILED_KEYS, _bind_keys(batch, record, keys))
    if not (found := dict(rows.fetchall())):
        return {}
    return {key: found[cleaned] for key in keys if (cleaned := _clean_text(key)) in found}


def find_bad_keys(batch: str, record: str) -> dict[int, bool]:
    """Return the keys of the batch's bad records of a kind, and whether to leave each out."""
    rows = execute_prepared("bad_keys", SELECT_BAD_KEYS, {"batch": batch, "record": record}).fetchall()
    return {int(key): waits for key, waits in rows}


def count_repeated() -> dict[tuple[str, str], int]:
    """Count repeated failures by batch and record; the next run usually ends a first failure."""
    counted = "select batch, record, count(*) from quarantine where failures > 1 group by batch, record"
    return {(batch, record): count for batch, record, count in database.execute_sql(counted).fetchall()}


def count_dead_letters() -> dict[tuple[str, str], int]:
    """Count rows that wait for a person: each `child` by name, each `message` by queue."""
    return {(kind, record): count for kind, record, count in database.execute_sql(COUNT_DEAD_LETTERS).fetchall()}


def retry(ids: pw.ModelSelect[Quarantined]) -> int:
    """Let the next run retry the rows with these *ids*; return their number.

    Unreadable messages are never retried.
    """
    which = (Quarantined.id.in_(ids), Quarantined.reason.not_in(REASONS_BY_KIND["message"]))
    return int(Quarantined.update(retry_at=pw.fn.clock_timestamp()).where(*which).execute())


def discard(ids: pw.ModelSelect[Quarantined]) -> int:
    """Delete the rows with these *ids*; return their number.

    Work that still exists is then tried as if it had never failed.
    """
    return int(Quarantined.delete().where(Quarantined.id.in_(ids)).execute())


def delete_old(horizon: datetime) -> int:
    """Delete rows without a failure since *horizon*, unless they wait for a person."""
    which = (Quarantined.failed_at < horizon, Quarantined.retry_at < NO_RETRY_AT)
    return int(Quarantined.delete().where(*which).execute())


def _bind_keys(batch: str, record: str, keys: Iterable[str]) -> dict[str, object]:
    return {"batch": batch, "record": record, "keys": format_array(map(_clean_text, keys))}


def _clean_text(value: str) -> str:
    """Return the text as PostgreSQL can store it: without NUL and halves of characters."""
    return value.replace("\0", "\\x00").encode(errors="backslashreplace").decode()

"""Batches as rows: since when they are known, and whether somebody has paused them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.use import BOTH, PROCESSES, Use

FOREVER = datetime(9999, 12, 31, tzinfo=UTC)
HELD_BACK = "(paused_until > clock_timestamp() or stopped_since is not null or held_since is not null)"
"""Whether no run of a batch may start."""
HoldBack = Literal["stopped", "held", "paused"]
WHY_HELD_BACK = """
    select case when stopped_since is not null then 'stopped' when held_since is not null then 'held'
        when paused_until > clock_timestamp() then 'paused' end
    from batches where name = %s
"""

# Since when stays as it is while one blocked run follows another, whatever the reason.
CHILD_BLOCKED = """
    insert into batches (name, blocked_since, blocked_reason, blocked_sentence, child_blocked_at)
    values (%(name)s, clock_timestamp(), %(reason)s, %(sentence)s, clock_timestamp())
    on conflict (name) do update set
        blocked_since = coalesce(batches.blocked_since, excluded.blocked_since),
        blocked_reason = excluded.blocked_reason, blocked_sentence = excluded.blocked_sentence,
        child_blocked_at = excluded.child_blocked_at
"""


class Batch(Base):
    """A batch.  What holds it back lives here, because a flushed Redis must not resume a deleter.

    While it is *paused* no run starts, and one that has started goes on.  While it is *stopped*, by a person, or
    *held*, by a brake, one that has started ends before its next chunk, and so does each child.

    It is blocked from the first of an unbroken row of runs that were; `JobRun` notes that as it closes them.
    """

    used_by = Use(PROCESSES, (("insert", (), BOTH), ("update", (), BOTH)))

    name = pw.TextField(primary_key=True)
    registered_at = DateTimeTZField(constraints=default("clock_timestamp()"))
    paused_until = DateTimeTZField(null=True)
    paused_since = DateTimeTZField(null=True)
    paused_reason = pw.TextField(null=True)
    paused_by = pw.TextField(null=True)
    cursor = pw.BigIntegerField(null=True)
    blocked_since = DateTimeTZField(null=True)
    blocked_reason = pw.TextField(null=True)
    blocked_sentence = pw.TextField(null=True)
    child_blocked_at = DateTimeTZField(null=True)
    stopped_since = DateTimeTZField(null=True)
    stopped_reason = pw.TextField(null=True)
    stopped_by = pw.TextField(null=True)
    held_since = DateTimeTZField(null=True)
    held_reason = pw.TextField(null=True)
    held_sentence = pw.TextField(null=True)
    released_at = DateTimeTZField(null=True)
    released_reason = pw.TextField(null=True)
    released_by = pw.TextField(null=True)
    released_expect = pw.BigIntegerField(null=True)
    released_run = pw.BigIntegerField(null=True)

    class Meta:
        table_name = "batches"

    @classmethod
    def register(cls, names: Iterable[str]) -> None:
        """Make the batches known; those that are already are left as they are."""
        cls.insert_many([{"name": name} for name in names]).on_conflict_ignore().execute()

    @classmethod
    def set_right(cls, name: str) -> None:
        """Mend times of the past that lie in the future: the clock was ahead when they were written."""
        now = pw.fn.clock_timestamp()
        past = (cls.registered_at, cls.paused_since, cls.stopped_since, cls.held_since)
        values = {field: pw.Case(None, [(field > now, now)], field) for field in past}
        ahead = pw.fn.greatest(*past) > now
        cls.update(values).where(cls.name == name, ahead).execute()

    @classmethod
    def paused(cls, name: str) -> pw.ModelSelect[Batch]:
        """Select the batch if it is paused at this moment."""
        return cls.select().where(cls.name == name, cls.paused_until > pw.fn.clock_timestamp())

    @classmethod
    def all_paused(cls) -> pw.ModelSelect[Batch]:
        """Select the batches that are paused at this moment."""
        return cls.select().where(cls.paused_until > pw.fn.clock_timestamp())

    @classmethod
    def why_held_back(cls, name: str) -> HoldBack | None:
        """Say why no run of the batch may start at this moment, None when one may."""
        row = database.execute_sql(WHY_HELD_BACK, (name,)).fetchone()
        reason: HoldBack | None = row and row[0]
        return reason

    @classmethod
    def all_stopped(cls) -> pw.ModelSelect[Batch]:
        """Select the batches that somebody has stopped."""
        return cls.select().where(cls.stopped_since.is_null(False))

    @classmethod
    def all_held(cls) -> pw.ModelSelect[Batch]:
        """Select the batches that a brake holds."""
        return cls.select().where(cls.held_since.is_null(False))

    @classmethod
    def stop(cls, name: str, *, reason: str, by: str) -> None:
        """End every run and child of the batch before its next chunk, and start none, until resumed."""
        cls.register([name])
        since = pw.fn.coalesce(cls.stopped_since, pw.fn.clock_timestamp())
        cls.update(stopped_since=since, stopped_reason=reason, stopped_by=by).where(cls.name == name).execute()

    @classmethod
    def hold(cls, name: str, *, reason: str, sentence: str) -> None:
        """Hold the batch, as a stop does, until it is released; *reason* is a word, *sentence* has the numbers."""
        cls.register([name])
        since = pw.fn.coalesce(cls.held_since, pw.fn.clock_timestamp())
        cls.update(held_since=since, held_reason=reason, held_sentence=sentence).where(cls.name == name).execute()

    @classmethod
    def release(cls, name: str, *, reason: str, by: str, expect: int | None = None) -> bool:
        """Let a held batch go, its next run up to *expect* records; return False when it was not held.

        The release is remembered either way: a run that a brake would hold is let go once by it.
        """
        cls.register([name])
        held = cls.all_held().where(cls.name == name).exists()
        cls.update(
            **dict.fromkeys(("held_since", "held_reason", "held_sentence")),
            released_at=pw.fn.clock_timestamp(),
            released_reason=reason,
            released_by=by,
            released_expect=expect,
            released_run=None,
        ).where(cls.name == name).execute()
        return held

    @classmethod
    def all_blocked(cls) -> pw.ModelSelect[Batch]:
        """Select the batches whose last run, or a child of it, was blocked."""
        return cls.select().where(cls.blocked_since.is_null(False))

    @classmethod
    def blocked(cls, name: str) -> Batch | None:
        """Return the batch if it is blocked."""
        row: Batch | None = cls.all_blocked().where(cls.name == name).first()
        return row

    @classmethod
    def child_blocked(cls, name: str, *, reason: str, sentence: str) -> None:
        """Note that a child of the batch was blocked; it stays so until the children of a whole run were not."""
        database.execute_sql(CHILD_BLOCKED, {"name": name, "reason": reason, "sentence": sentence})

    @classmethod
    def pause(cls, name: str, *, until: datetime | None, reason: str | None, by: str) -> None:
        """Start no run of the batch before *until*, or ever if None; a running one goes on."""
        cls.register([name])
        now = pw.fn.clock_timestamp()
        since = pw.Case(None, [(cls.paused_until > now, cls.paused_since)], now)
        values = {"paused_until": until or FOREVER, "paused_since": since, "paused_reason": reason, "paused_by": by}
        cls.update(values).where(cls.name == name).execute()

    @classmethod
    def position(cls, name: str) -> int:
        """Return where the batch's last run ended; 0 when it has to begin at the beginning."""
        row = cls.get_or_none(cls.name == name)
        return (row and row.cursor) or 0

    @classmethod
    def move_to(cls, name: str, position: int) -> None:
        """Remember where the batch's next run goes on."""
        cls.register([name])
        cls.update(cursor=position).where(cls.name == name).execute()

    @classmethod
    def resume(cls, name: str) -> bool:
        """End a pause and a stop; return False when there was neither."""
        held_back = cls.paused(name).exists() or cls.all_stopped().where(cls.name == name).exists()
        fields = ("paused_until", "paused_since", "paused_reason", "paused_by")
        nothing = dict.fromkeys((*fields, "stopped_since", "stopped_reason", "stopped_by"))
        cls.update(nothing).where(cls.name == name).execute()
        return held_back

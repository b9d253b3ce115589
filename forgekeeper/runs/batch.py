"""Batches as rows: since when they are known, whether they are blocked, and what was released."""

from __future__ import annotations

from collections.abc import Iterable

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.grants import BOTH, PROCESSES, Use
from forgekeeper.database.writes import writing

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
    """A batch.  What holds it back is in `Hold`: the columns here are for processes of older versions, and not read.

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
        """Correct a registration that lies in the future: the clock was ahead when it was written."""
        now = pw.fn.clock_timestamp()
        cls.update(registered_at=now).where(cls.name == name, cls.registered_at > now).execute()

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
    def position(cls, name: str) -> int:
        """Return where the batch's last run ended; 0 when it has to begin at the beginning."""
        row = cls.get_or_none(cls.name == name)
        return (row and row.cursor) or 0

    @classmethod
    def move_to(cls, name: str, position: int) -> None:
        """Remember where the batch's next run goes on."""
        with writing():
            cls.register([name])
            cls.update(cursor=position).where(cls.name == name).execute()

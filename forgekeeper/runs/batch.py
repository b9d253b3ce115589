"""Batches as rows: since when they are known, whether they are blocked, and what was released."""

from __future__ import annotations

from collections.abc import Iterable

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.writes import writing

# Since when stays as it is while one blocked run follows another, whatever the reason.
BLOCK = """
    insert into batches (name, blocked_since, blocked_reason, blocked_sentence, child_blocked_at)
    values (%(name)s, clock_timestamp(), %(reason)s, %(sentence)s, case when %(child)s then clock_timestamp() end)
    on conflict (name) do update set
        blocked_since = coalesce(batches.blocked_since, excluded.blocked_since),
        blocked_reason = excluded.blocked_reason, blocked_sentence = excluded.blocked_sentence,
        child_blocked_at = excluded.child_blocked_at
"""
# A run that was not blocked ends a block, unless one of its children was since the run before it ended: theirs have
# not been worked on yet.
UNBLOCK = """
    update batches set blocked_since = null, blocked_reason = null, blocked_sentence = null, child_blocked_at = null
    where name = %(name)s and blocked_since is not null and (
        child_blocked_at is null or child_blocked_at < (
            select finished_at from job_runs
            where batch = %(name)s and id < %(run)s and started_at is not null and finished_at is not null
            order by id desc limit 1
        )
    )
"""


class Batch(Base):
    """A batch.  What holds it back is in `Hold`: the columns here are for processes of older versions, and not read.

    It is blocked from the first of an unbroken row of runs that were; `JobRun` notes that as it closes them.
    """

    grants = "scheduler: select, insert, update; worker: select, insert, update; exporter: select"

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
    def all_blocked(cls) -> pw.ModelSelect[Batch]:
        """Select the batches whose last run, or a child of it, was blocked."""
        return cls.select().where(cls.blocked_since.is_null(False))

    @classmethod
    def blocked(cls, name: str) -> Batch | None:
        """Return the batch if it is blocked."""
        row: Batch | None = cls.all_blocked().where(cls.name == name).first()
        return row

    @classmethod
    def block(cls, name: str, *, reason: str, sentence: str, child: bool = False) -> None:
        """Note that a run was blocked; or a *child*: it stays so until the children of a whole run were not."""
        database.execute_sql(BLOCK, {"name": name, "reason": reason, "sentence": sentence, "child": child})

    @classmethod
    def unblock(cls, name: str, run: int) -> None:
        """Note that the run was not blocked."""
        database.execute_sql(UNBLOCK, {"name": name, "run": run})

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

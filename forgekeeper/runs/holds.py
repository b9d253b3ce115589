"""Holds: what keeps runs of a batch from starting, a row each, and the one question about them.

They live in PostgreSQL, because a flushed Redis must not resume a deleter.  Holds of different people stand beside one
another: none shortens or ends another.  Columns of `batches` show other programs what stands, kept in step by triggers
of migration 0012; what these write there becomes a hold (`docs/adr/0026`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, database, default
from metrics.logs import one_line

Kind = Literal["pause", "stop", "breaker", "new"]
BY_PEOPLE: tuple[Kind, ...] = ("pause", "stop")
"""`resume` ends these."""
BRAKES: tuple[Kind, ...] = ("breaker", "new")
"""`release` ends these."""
HoldBack = Literal["stopped", "held", "paused"]
STANDS = "(until is null or until > clock_timestamp())"
HELD_BACK = f"exists (select from holds where holds.batch = {{}} and {STANDS})"
"""Whether no run of a batch may start."""
WHY = f"""
    select case kind when 'stop' then 'stopped' when 'pause' then 'paused' else 'held' end
    from holds where batch = {{}} and {STANDS} and kind = any({{}})
    order by kind <> 'stop', kind = 'pause' limit 1
"""
"""Why: a stop before a brake before a pause."""
ENDS = "'{stop,breaker,new}'"
"""The kinds that end a run that has started; a pause does not."""
ANY = "'{pause,stop,breaker,new}'"

# It waits for no lock: a row of the same person that another session has locked stays, and this one stands beside it.
ADD = f"""
    with older as (
        delete from holds where id in (
            select id from holds
            where batch = %(batch)s and (not {STANDS} or (kind = %(kind)s and by = %(by)s))
            for update skip locked
        )
        returning kind, by, since, until
    )
    insert into holds (batch, kind, reason, by, since, until)
    values (%(batch)s, %(kind)s, %(reason)s, %(by)s, least(clock_timestamp(), %(since)s::timestamptz,
        (select min(since) from older where kind = %(kind)s and by = %(by)s and {STANDS})), %(until)s)
"""


class Held(Exception):
    """The run must not begin, as it is out of proportion; the message is a sentence with the numbers, and what to do.

    It is raised before anything is changed.  The batch is held from then on, until it is released.
    """

    def __init__(self, kind: Kind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Hold(Base):
    """What holds a batch back: *kind* says how, *reason* why in a sentence, *by* who; without *until* it has no end.

    While a batch is held by a `pause` no run starts, and one that has started goes on.  With a `stop`, by a person, or
    a brake (`breaker`, `new`), one that has started ends before its next chunk, and so does each child.
    """

    grants = "person: delete; scheduler: select, update (since); worker: select, insert; exporter: select"

    id = BigIdentityField()
    batch = pw.TextField()
    kind = pw.TextField()
    reason = pw.TextField(null=True)
    by = pw.TextField()
    since = DateTimeTZField(constraints=default("clock_timestamp()"))
    until = DateTimeTZField(null=True)

    class Meta:
        table_name = "holds"

    @classmethod
    def add(
        cls,
        batch: str,
        kind: Kind,
        *,
        reason: str | None,
        by: str,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> None:
        """Hold the batch back, beside what others do; it takes the place of an older one of that kind by the same.

        It stands from now on; *since* is the moment that is shown where several batches are held back by one act.
        """
        facts = {"reason": reason and one_line(reason), "by": one_line(by), "since": since, "until": until}
        database.execute_sql(ADD, {"batch": batch, "kind": kind, **facts})

    @classmethod
    def lift(cls, batch: str, kinds: Sequence[Kind], *, by: str | None = None) -> list[Hold]:
        """End what holds the batch back, of those kinds: *by* one person, or all; return it."""
        query = cls.delete().where(cls.batch == batch, cls.kind.in_(kinds), pw.SQL(STANDS))
        if by is not None:
            query = query.where(cls.by == one_line(by))
        return list(query.returning(cls).execute())

    @classmethod
    def standing(cls, *kinds: Kind, batch: str | None = None) -> list[Hold]:
        """Return what holds batches back at this moment, the oldest first; of all kinds and batches, or of those."""
        query = cls.select().where(pw.SQL(STANDS)).order_by(cls.batch, cls.id)
        query = query.where(cls.kind.in_(kinds)) if kinds else query
        return list(query if batch is None else query.where(cls.batch == batch))

    @classmethod
    def why(cls, batch: str) -> HoldBack | None:
        """Say why no run of the batch may start at this moment, None when one may."""
        row = database.execute_sql(WHY.format("%s", ANY), (batch,)).fetchone()
        reason: HoldBack | None = row and row[0]
        return reason

    @classmethod
    def show(cls, batch: str) -> None:
        """Show in `batches` what stands: a trigger does so unless another session has the row locked just then."""
        database.execute_sql("select project_holds(%s)", (batch,))


Hold.add_index(pw.SQL("create index holds_batch on holds (batch)"))

"""Batches as rows, and their holds: a hold is a row that keeps runs from starting.

Holds are stored in PostgreSQL, because a flushed Redis must not resume a deleter.  Holds of different people are
independent: none shortens or ends another.  Columns of `batches` show holds to other programs, kept in step by triggers
of migration 0012; a value that these programs write there becomes a hold (`docs/adr/0026`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from shlex import quote
from typing import Literal

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.database import Base, BigIdentityField, database, default_sql
from forgekeeper.platform.database.sessions import write_transaction
from forgekeeper.platform.settings import Settings
from metrics.logs import clean_input

Kind = Literal["pause", "stop", "breaker", "new"]
KINDS_BY_PEOPLE: tuple[Kind, ...] = ("pause", "stop")
"""Kinds that `resume` ends."""
GUARD_HOLD_KINDS: tuple[Kind, ...] = ("breaker", "new")
"""Kinds that `release` ends."""
HoldState = Literal["stopped", "held", "paused"]
HOLD_IS_ACTIVE = "(until is null or until > clock_timestamp())"
BATCH_HAS_HOLD = f"exists (select from holds where holds.batch = {{}} and {HOLD_IS_ACTIVE})"
"""SQL: whether no run of a batch may start."""
SELECT_HOLD_STATE = f"""
    select case kind when 'stop' then 'stopped' when 'pause' then 'paused' else 'held' end
    from holds where batch = {{}} and {HOLD_IS_ACTIVE} and kind = any({{}})
    order by kind <> 'stop', kind = 'pause' limit 1
"""
"""SQL: the reason; a stop comes before a hold of a guard, and that before a pause."""
# It compares with the values that `project_holds` of migration 0012 writes.
BATCH_SHOWS_HOLDS = """(
    select (
        batches.paused_until, batches.paused_since, batches.paused_reason, batches.paused_by,
        batches.stopped_since, batches.stopped_reason, batches.stopped_by,
        batches.held_since, batches.held_reason, batches.held_sentence
    ) is not distinct from (
        case when pause.id is not null then coalesce(pause.until, '9999-12-31 00:00Z') end,
        pause.since, pause.reason, pause.by, stop.since, stop.reason, stop.by, held.since, held.kind, held.reason
    )
    from (values (1)) as one
    left join lateral (
        select * from holds where batch = batches.name and kind = 'pause' order by until desc, id limit 1
    ) as pause on true
    left join lateral (
        select * from holds
        where batch = batches.name and kind = 'stop' and (until is null or until > clock_timestamp())
        order by id limit 1
    ) as stop on true
    left join lateral (
        select * from holds where batch = batches.name and kind in ('breaker', 'new') order by kind, id limit 1
    ) as held on true
)"""
"""SQL: whether the columns of a row of `batches` show its holds."""
KINDS_THAT_END_RUNS = "'{stop,breaker,new}'"
"""Kinds that end a run that has started; a pause does not."""
ALL_HOLD_KINDS = "'{pause,stop,breaker,new}'"

# The statement waits for no lock: a row of the same person that another session has locked stays, beside the new row.
# A row that is kept is locked, so that nobody ends it before this transaction does.
INSERT_HOLD = f"""
    with found as (
        select id, since, {HOLD_IS_ACTIVE} as stands,
            {HOLD_IS_ACTIVE} and not %(replace)s
                and coalesce(until, 'infinity') > coalesce(%(until)s::timestamptz, 'infinity') as longer
        from holds
        where batch = %(batch)s and (not {HOLD_IS_ACTIVE} or (kind = %(kind)s and by = %(by)s))
        for update skip locked
    ), older as (
        delete from holds where id in (select id from found where not longer)
    ), added as (
        insert into holds (batch, kind, reason, by, since, until)
        select %(batch)s, %(kind)s, %(reason)s, %(by)s,
            least(clock_timestamp(), %(since)s::timestamptz, (select min(since) from found where stands)), %(until)s
        where not exists (select from found where longer)
    )
    select id from found where longer order by id
"""
# `blocked_since` stays while one blocked run follows another, whatever the reason.
UPSERT_BLOCK = """
    insert into batches (name, blocked_since, blocked_reason, blocked_sentence, child_blocked_at)
    values (%(name)s, clock_timestamp(), %(reason)s, %(sentence)s, case when %(child)s then clock_timestamp() end)
    on conflict (name) do update set
        blocked_since = coalesce(batches.blocked_since, excluded.blocked_since),
        blocked_reason = excluded.blocked_reason, blocked_sentence = excluded.blocked_sentence,
        child_blocked_at = excluded.child_blocked_at
"""
# A run that was not blocked ends a block, unless one of its children was blocked after the run before it ended: the
# children of the present run have not been worked on yet.
CLEAR_BLOCK = """
    update batches set blocked_since = null, blocked_reason = null, blocked_sentence = null, child_blocked_at = null
    where name = %(name)s and blocked_since is not null and (
        child_blocked_at is null or child_blocked_at < (
            select finished_at from job_runs
            where batch = %(name)s and id < %(run)s and started_at is not null and finished_at is not null
            order by id desc limit 1
        )
    )
"""


class BatchHeld(Exception):
    """The run must not begin because it is out of proportion.

    The message is a sentence with the numbers and the remedy.  Raised before anything is changed.  The batch is held
    until it is released.
    """

    def __init__(self, kind: Kind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Hold(Base):
    """A hold of a batch: its *kind*, *reason*, author (*by*), and end (*until*).

    Without *until* it has no end.  A `pause` keeps runs from starting, and a started run continues.  A `stop` by a
    person, or a guard (`breaker`, `new`), also ends a started run and each child before the next chunk.
    """

    grants = "person: delete; scheduler: select, update (since); worker: select, insert; exporter: select"

    id = BigIdentityField()
    batch = pw.TextField()
    kind = pw.TextField()
    reason = pw.TextField(null=True)
    by = pw.TextField()
    since = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
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
        replace: bool = False,
    ) -> Hold | None:
        """Hold the batch from now on; return None, or the hold that stays instead.

        Holds of other people are independent.  The new hold replaces an older hold of that kind by the same person.  If
        the older hold ends later, it stays and nothing is added, unless *replace*: several people may share an account.
        *since* is the time to show if one act holds several batches.
        """
        facts = {"reason": reason and clean_input(reason), "by": clean_input(by), "since": since, "until": until}
        kept = database.execute_sql(INSERT_HOLD, {"batch": batch, "kind": kind, "replace": replace, **facts}).fetchone()
        return kept and cls.get_by_id(kept[0])

    @classmethod
    def lift(
        cls, batch: str, kinds: Sequence[Kind], *, by: str | None = None, among: Collection[int] | None = None
    ) -> list[Hold]:
        """End and return the batch's holds of these kinds: all, or *by* a person, *among* ids."""
        query = cls.delete().where(cls.batch == batch, cls.kind.in_(kinds), pw.SQL(HOLD_IS_ACTIVE))
        if by is not None:
            query = query.where(cls.by == clean_input(by))
        if among is not None:
            query = query.where(cls.id.in_(list(among)))
        return list(query.returning(cls).execute())

    @classmethod
    def list_active(cls, *kinds: Kind, batch: str | None = None) -> list[Hold]:
        """Return the present holds, the oldest first: all, or of these kinds and this batch."""
        query = cls.select().where(pw.SQL(HOLD_IS_ACTIVE)).order_by(cls.batch, cls.id)
        query = query.where(cls.kind.in_(kinds)) if kinds else query
        return list(query if batch is None else query.where(cls.batch == batch))

    @classmethod
    def find_state(cls, batch: str) -> HoldState | None:
        """Return why no run of the batch may start now; None if a run may start."""
        row = database.execute_sql(SELECT_HOLD_STATE.format("%s", ALL_HOLD_KINDS), (batch,)).fetchone()
        reason: HoldState | None = row and row[0]
        return reason

    @classmethod
    def copy_to_batches(cls, batch: str) -> None:
        """Show the holds in `batches`.

        A trigger does so unless another session has locked the row.
        """
        database.execute_sql("select project_holds(%s)", (batch,))


Hold.add_index(pw.SQL("create index holds_batch on holds (batch)"))


class Batch(Base):
    """A batch, its block and its release.

    Its holds are in `Hold`; the columns for them are for older versions and not read.  It is blocked from the first of
    consecutive blocked runs.  `JobRun` records that when it closes them.
    """

    grants = "scheduler: select, insert, update; worker: select, insert, update; exporter: select"

    name = pw.TextField(primary_key=True)
    registered_at = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
    paused_until = DateTimeTZField(null=True)
    paused_since = DateTimeTZField(null=True)
    paused_reason = pw.TextField(null=True)
    paused_by = pw.TextField(null=True)
    cursor = pw.BigIntegerField(null=True)
    blocked_since = DateTimeTZField(null=True)
    blocked_reason = pw.TextField(null=True)
    blocked_sentence = pw.TextField(null=True)
    child_blocked_at = DateTimeTZField(null=True)
    redis_epoch = pw.TextField(null=True)
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
        """Insert rows for the batches; existing rows stay unchanged."""
        cls.insert_many([{"name": name} for name in names]).on_conflict_ignore().execute()

    @classmethod
    def list_blocked(cls, name: str | None = None) -> list[Batch]:
        """Return the batches whose last run, or a child of it, was blocked; or only batch *name*."""
        query = cls.select().where(cls.blocked_since.is_null(False))
        return list(query if name is None else query.where(cls.name == name))

    @classmethod
    def block(cls, name: str, *, reason: str, sentence: str, child: bool = False) -> None:
        """Record a blocked run or *child*.

        A child's block stays until a whole run has no blocked children.
        """
        with write_transaction():
            database.execute_sql(UPSERT_BLOCK, {"name": name, "reason": reason, "sentence": sentence, "child": child})

    @classmethod
    def unblock(cls, name: str, run: int) -> None:
        """Record that the run was not blocked."""
        database.execute_sql(CLEAR_BLOCK, {"name": name, "run": run})

    @classmethod
    def end_block(cls, name: str, reason: str) -> None:
        """Record that a person has removed the *reason* of a block; another block stays."""
        solved = dict.fromkeys(("blocked_since", "blocked_reason", "blocked_sentence", "child_blocked_at"))
        cls.update(solved).where(cls.name == name, cls.blocked_reason == reason).execute()

    @classmethod
    def read_position(cls, name: str) -> int:
        """Return the end position of the batch's last run; 0 to begin at the beginning."""
        row = cls.get_or_none(cls.name == name)
        return (row and row.cursor) or 0

    @classmethod
    def store_position(cls, name: str, position: int) -> None:
        """Store the start position of the batch's next run."""
        with write_transaction():
            cls.register([name])
            cls.update(cursor=position).where(cls.name == name).execute()


def find_idle_batches(settings: Settings) -> set[str]:
    """Name the batches that are paused, stopped, held or without a schedule."""
    return {hold.batch for hold in Hold.list_active()} | {
        name for name in BATCHES if settings.schedule_of(name) is None
    }


def list_warnings() -> list[str]:
    """Return a sentence for each batch that is stopped, held, blocked, or paused without end."""
    holds = [hold for hold in Hold.list_active() if hold.kind != "pause" or hold.until is None]
    return [*map(_describe_hold, holds), *map(_describe_block, Batch.list_blocked())]


def describe_obstacles(batch: str) -> list[str]:
    """Return a sentence for each hold of the batch, and for its block."""
    return [*map(_describe_hold, Hold.list_active(batch=batch)), *map(_describe_block, Batch.list_blocked(batch))]


def _describe_hold(hold: Hold) -> str:
    batch, since, because = hold.batch, _format_instant(hold.since), f" ({hold.reason})" if hold.reason else ""
    if hold.kind in GUARD_HOLD_KINDS:
        sentence = str(hold.reason).rstrip(". ")
        remedy = (
            "" if "forgekeeper release" in sentence else f": `forgekeeper release {batch} --reason ...` ends the hold"
        )
        return f"{batch} has been held since {since} ({hold.kind}): {sentence}{remedy}"
    resume = f"`forgekeeper resume {batch} --by {quote(hold.by)}`"
    if hold.kind == "stop":
        return f"{batch} has been stopped by {hold.by} since {since}{because}: {resume} ends the stop"
    end = "without an end" if hold.until is None else f"until {_format_instant(hold.until)}"
    remedy = f"{resume}, or `forgekeeper pause {batch} --replace --until TIME`"
    return f"{batch} has been paused by {hold.by} since {since}, {end}{because}: {remedy}"


def _describe_block(row: Batch) -> str:
    return (
        f"{row.name} has been blocked since {_format_instant(row.blocked_since)} ({row.blocked_reason}):"
        f" {row.blocked_sentence}"
    )


def _format_instant(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")

"""Delete user statuses whose time has passed (batch 48).

Runs every minute.  It deletes a hundred rows at a time until none is left or half a
minute has gone by; what remains, and what others hold locked, waits for the next minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Literal

from forgekeeper.audit.subjects import Subject
from forgekeeper.batches import Record, Threshold, batch
from forgekeeper.brought import Figure, Results, Sample, processed
from forgekeeper.database import chosen, database, now
from forgekeeper.database.backlog import Backlog
from forgekeeper.database.chunks import IN_ORDER, START, Position, page
from forgekeeper.database.prepared import Prepared
from forgekeeper.database.stakes import Stake
from forgekeeper.database.survey import Rows
from forgekeeper.preview import Look, Part
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.run import Run
from forgekeeper.settings import Settings
from models import UserStatus

BATCH_SIZE = 100
MAX_RUNTIME = timedelta(seconds=30)

DUE = "clear_status_at <= %(now)s"
"""What goes; what `run --dry-run` counts, too."""

# ``= ANY(ARRAY(...))`` is computed once.  ``IN (SELECT ... LIMIT n)`` is not: under a
# nested loop PostgreSQL repeats the subquery, finds unlocked rows anew each time, and
# deletes them all.  A status that is extended between our snapshot and our lock has a new
# ctid, which this snapshot does not see; the condition outside says so to the reader, and
# would hold for any other key.  By ctid it is a third faster; but only in one table of its
# own is it a key: rows of two partitions have the same, and a view has none (`ORDINARY`).
#
# Statistics may be stale: where few were due when the table was analyzed, PostgreSQL would read all that are due for
# each chunk anew; by a plan that was made while the table was tiny it would read the table.  So the claim takes the
# index in its order (`IN_ORDER`), not by a bitmap that is sorted afterwards; and the condition outside is of a form
# that no index answers: the deletion goes by its key.
DELETE_DUE = """
    with claimed as materialized (
        select {key} as key, clear_status_at, user_id from user_statuses
        where {due} and (clear_status_at, user_id) > (%(instant)s, %(key)s){chosen}
        order by clear_status_at, user_id
        limit {limit}
        for update skip locked
    ), deleted as (
        delete from user_statuses
        where {key} = any(array(select key from claimed)) and ({due}) is true
        returning clear_status_at, user_id
    ), reached as (
        select clear_status_at, user_id from deleted
        union all
        select clear_status_at, user_id from claimed where not exists (select from deleted)
    ){audited}
    select (select count(*) from deleted), clear_status_at::text, user_id
    from reached order by reached.clear_status_at desc, user_id desc limit 1
"""
# The table is proved to be an ordinary one.
ORDINARY = """
    select relkind = 'r' and not relispartition and has_table_privilege(oid, 'select')
        and not exists (select from pg_inherits where inhparent = oid)
    from pg_class where oid = to_regclass('user_statuses')
"""
# Of five statuses two have expired, two expire later, one never does.
SAMPLE = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'palm_tree', 'Away, sample ' || n,
        case when n %% 5 < 2 then clock_timestamp() - n * interval '1 second'
             when n %% 5 < 4 then clock_timestamp() + interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""


@dataclass
class Outcome:
    """What a run comes to; it grows with each transaction."""

    deleted: int = 0
    batches: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(
    document=48,
    cron="* * * * *",
    cron_sentence="When expired user statuses are deleted.",
    pace_sentence="Statuses deleted per second at most; unset: no limit.",
    budget=MAX_RUNTIME,
    time_limit=timedelta(seconds=90),
    team="system-admins",
    outcome=Outcome,
    tables=[UserStatus],
    records=[
        Record(
            "user_status",
            examined=("deleted",),
            processed=("deleted",),
            errors={"database": ()},
            objective=timedelta(minutes=5),
        )
    ],
    thresholds=[Threshold("duration", above=60), Threshold("backlog", above=10_000)],
    collector="user_statuses",
    steps=["deleted"],
)
def user_status_cleanup(run: Run[Outcome]) -> None:
    """Delete user statuses whose time has passed."""
    outcome, position, statuses = run.outcome, START, UserStatus.due(run.now)
    audited = run.audit.clause("user_status", "deleted", id="user_id", due="clear_status_at")
    statement = partial(_statement, row_key(), audited)
    with run.bad_records("user_status", statuses) as bad:
        while limit := run.allowed(BATCH_SIZE):
            following = partial(page, statuses, UserStatus.clear_status_at, position, limit=limit, without=bad.keys)
            reached = bad.chunk(partial(_delete, run, bad, statement, position, limit=limit), following)
            if reached is None:
                return
            position = reached
            run.step("deleted")
            if run.deadline.passed(outcome.deleted - run.deadline.done):
                break
        outcome.stopped = "deadline"


def row_key() -> Literal["ctid", "user_id"]:
    """Return what tells the rows apart: by ctid it is faster, where the table is proved to be an ordinary one."""
    row = database.execute_sql(ORDINARY).fetchone()
    return "ctid" if row and row[0] else "user_id"


def _delete(
    run: Run[Outcome],
    bad: BadRecords,
    statement: Callable[..., str],
    after: Position,
    only: Sequence[int] | None,
    *,
    limit: int,
) -> Position | None:
    """Delete the next due statuses, of *only* these users; return how far that came, None if it found nothing.

    Rows that another transaction has locked are passed over, not waited for; so is a row that
    was changed while we looked: a later run sees it as it is then.
    """
    values = {"now": run.now, "only": only, "without": list(bad.keys), **after._asdict(), **run.audit.values}
    text = statement(limit, only=only is not None, without=bool(bad.keys))
    if only is None and limit == BATCH_SIZE:
        # Planned for each chunk, a run took a third longer: `python -m benchmarks statuses`.
        text = Prepared("delete_due_statuses", text, first=IN_ORDER)
    else:
        text = IN_ORDER + text
    row = database.execute_sql(text, values).fetchone()
    if row is None:
        return None
    run.outcome.deleted += row[0]
    run.outcome.batches += row[0] > 0
    return Position(*row[1:])


@cache
def _statement(key: str, audited: str, limit: int, *, only: bool, without: bool) -> str:
    """Return the statement of a chunk; of *only* chosen users, *without* others, where it is so."""
    chosen_ = chosen("user_id", only=[] if only else None, without=[0] if without else ())
    return DELETE_DUE.format(key=key, due=DUE, chosen=chosen_, audited=audited, limit=limit)


user_status_cleanup.audited(
    Subject("status", "USER", "user_status", because="it was to be cleared at {due}", gone="of that user was deleted")
)


@user_status_cleanup.backlog("user_status")
def due(now: datetime) -> Backlog:
    """Count the statuses whose time has come."""
    return Backlog.of(UserStatus.due(now).order_by(UserStatus.clear_status_at), oldest=UserStatus.clear_status_at)


@user_status_cleanup.at_stake
def at_stake(now: datetime) -> Stake:
    """Look at the statuses whose time has come, of all."""
    return Stake.rows(UserStatus.due(now))


@user_status_cleanup.preview
def foreseen(look: Look) -> Iterator[Part]:
    """Count the statuses whose time has come; what their users say of themselves is not shown."""
    part = look.part("user_status")
    due = Rows("user_statuses", DUE, {"now": look.now}, key="user_id", due="clear_status_at", name="emoji")
    yield look.count(part, due)


def sample(total: int) -> int:
    """Add *total* statuses; return how many of them are due."""
    database.execute_sql(SAMPLE, {"total": total})
    return sum(n % 5 < 2 for n in range(total))


@user_status_cleanup.sample
def add_sample(scale: int, _settings: Settings) -> Sample:
    """Add user statuses, some of them due."""
    total = 5_000 * scale
    return Sample("user statuses", total, sample(total))


@user_status_cleanup.present
def present(_settings: Settings) -> Sample:
    """Count what there is, and what is due."""
    return Sample("user statuses", UserStatus.select().count(), UserStatus.due(now()).count())


@user_status_cleanup.proof
def proof(before: Sample, _results: Results) -> Iterator[Figure]:
    """Say what the pages of metrics show of it."""
    yield processed("user_status_cleanup", "user_status", before.due)
    yield Figure("exporter", "backlog_records", {"batch": "user_status_cleanup", "record": "user_status"}, 0)

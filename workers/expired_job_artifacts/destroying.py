"""How an expired batch is destroyed: the statement of batch 11, and where it goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.audit.deletions import Audit
from forgekeeper.database import LOWEST, chosen, database, sqlstate
from forgekeeper.database.chunks import IN_ORDER
from forgekeeper.database.prepared import Prepared
from forgekeeper.runs.brakes import Brakes, NoBrakes
from forgekeeper.runs.totals import NONE, Amount
from models import MAY_GO, JobArtifact

TURNS = 0x6B656570
"""The advisory locks by which our children wait for one another, a project each: the letters ``keep``."""
NO_BRAKES = NoBrakes()
RECORD = "expired_artifact"
"""What an artifact is called in the audit, and when it is bad."""
CLASSES = 10
"""Artifacts fall into ten classes, ``(project_id + job_id) mod 10``; a bucket of five is two of them."""

# All or nothing, and one statement: nothing can be destroyed without its object being
# recorded and its bytes taken off, and the counts are those of rows really deleted.
#
# Every bucket touches every project.  Children wait for one another by project, in one
# order, on locks that are ours alone (``turns``): without the order ten of them deadlock by
# the hundred.  Whoever else has a project's statistics locked then is not waited for: they may
# be kept for hours, and every bucket would stand still.  ``totals`` locks what it gets; what is
# ``present`` and was not got is ``held_up``, and its artifacts stay for now.  One that has no
# statistics is not held up.  Each step names the count of the one before so that PostgreSQL
# cannot put that off.
#
# What comes after the turns is done by one child at a time.  So they come last, with little but the
# commit after them: two processes destroy 1.75 times as much as one, and with turns and statistics
# first 0.97 times (`python -m benchmarks artifacts_two`).  Should others have statistics locked then,
# it is too late to leave their artifacts: the statement fails, and is repeated with these first.
#
# What has neither a final path nor a file has no object to record.  What has a file alone is not
# claimed (`models.NO_PATH`).
#
# Statistics may be stale or missing, and no batch may read everything that has expired
# because of it.  So the deletion names the ends of its batch, should it go through the
# index instead of by id; and the claim takes the index in its order, whatever else seems
# cheaper (`IN_ORDER`): then the same plan is good for all batches (`PLANNED_ONCE`).
PLANNED_ONCE = f"{IN_ORDER}set local plan_cache_mode = force_generic_plan; "
PAST = "expire_at < %(now)s"
CLASS = "mod(project_id + job_id, 10)"
DUE = f"{PAST} and {MAY_GO}"
"""What goes; what `run --dry-run` counts, too."""
EXPIRED = f"""{CLASS} = %(class)s and {DUE}
          and (expire_at, id) > (%(expired)s, %(id)s)"""
CLAIMED = f"""
    with {{first}} as materialized (
        select id, project_id, expire_at, coalesce(size, 0) as size from ci_job_artifacts
        where {EXPIRED}{{chosen}}
        order by expire_at, id
        limit %(limit)s
        for update skip locked
    ){{within}}"""
# Where bytes are limited, of what was claimed the first that keep within what is left.
WITHIN = """, claimed as materialized (
        select id, project_id, expire_at from (
            select id, project_id, expire_at, sum(size) over (order by expire_at, id) as total from candidates
        ) as added_up where total <= %(room)s::bigint
    )"""
STATISTICS_LOCKED = f""", present as materialized (
        select project_id from project_statistics where project_id = any(array(select distinct project_id from claimed))
    ), turns as materialized (
        select pg_advisory_xact_lock({TURNS}, project)
        from (select distinct hashint8(project_id) as project from claimed order by project) as projects
        where (select count(*) from present) >= 0{{after}}
    ), totals as materialized (
        select project_id from project_statistics
        where (select count(*) from turns) >= 0
          and project_id = any(array(select distinct project_id from claimed))
        order by project_id
        for no key update skip locked
    ), held_up as materialized (
        select project_id from present
        where (select count(*) from totals) >= 0 and project_id <> all(array(select project_id from totals))
    )"""
DESTROYED = f""", destroyed as (
        delete from ci_job_artifacts
        where id = any(array(select id from claimed where {{free}}))
          and {EXPIRED}
          and (expire_at, id) <= (select expire_at, id from claimed order by expire_at desc, id desc limit 1)
        returning id, project_id, file_store, file, file_final_path, coalesce(size, 0) as size{{whole}}
    ), recorded as (
        insert into ci_deleted_objects (project_id, file_store, store_dir, file, pick_up_at)
        -- "/a" must not come out as "a": that would be somebody else's object.
        select project_id, file_store, coalesce(folder, ''), case when folder = '' then file_final_path else last end,
            %(now)s::timestamptz + %(grace)s::interval
        from destroyed,
            lateral (select split_part(file_final_path, '/', -1) as last offset 0) as name,
            lateral (
                select left(file_final_path, greatest(0, length(file_final_path) - length(last) - 1)) as folder offset 0
            ) as place
        where file_final_path <> ''
        returning 1
    ){{audited}}"""
REDUCED = """, reduced as (
        update project_statistics as total set build_artifacts_size = total.build_artifacts_size - gone.size
        from (select project_id, sum(size) as size from destroyed group by project_id) as gone
        where total.project_id = gone.project_id
    )
    select (select count(*) from destroyed), (select coalesce(sum(size), 0)::bigint from destroyed),
        expire_at::text, id, {held_up}
    from claimed order by claimed.expire_at desc, id desc limit 1
"""
FREE = "project_id <> all(array(select project_id from held_up))"
HELD_UP = "array(select project_id from held_up)"
# A text that is no array is an error, and one that says to whoever reads the server's log what happened.
NONE_HELD_UP = """case when exists (select from held_up)
            then (select 'statistics locked by others, first of project ' || min(project_id) from held_up)::bigint[]
            else array[]::bigint[] end"""
NO_ARRAY = "22P02"
"""How a statement fails that comes to locked statistics too late."""
WHOLE = ", job_id, partition_id, file_type, size as bytes, expire_at, created_at, updated_at"
AUDITED = {
    **{name: name for name in ("project_id", "job_id", "partition_id", "file_type", "file_store", "file", "bytes")},
    "path": "file_final_path",
    "due": "expire_at",
    "created_at": "created_at",
    "updated_at": "updated_at",
}
"""What the audit says of an artifact besides its id: all of its row, so that it can be inserted back."""
NEXT_EXPIRED = f"""
    select expire_at::text, id from ci_job_artifacts
    where {EXPIRED}{{chosen}}
    order by ci_job_artifacts.expire_at, id
    limit %(limit)s
"""


NEXT_SIZES = f"""
    select greatest(coalesce(size, 0), 1) from ci_job_artifacts
    where {EXPIRED}{{chosen}}
    order by ci_job_artifacts.expire_at, id
    limit %(limit)s
    for update skip locked
"""


@cache
def statement(*, statistics_first: bool, chosen: str = "", limited: bool = False, audited: str = "") -> str:
    """Return the statement that destroys a batch: of what is *chosen*, of *limited* bytes, with that clause."""
    written = ("recorded", "audited") if "audited as" in audited else ("recorded",)
    after = "".join(f" and (select count(*) from {one}) >= 0" for one in written)
    claimed = CLAIMED.format(
        first="candidates" if limited else "claimed", chosen=chosen, within=WITHIN if limited else ""
    )
    locked = STATISTICS_LOCKED.format(after="" if statistics_first else after)
    destroyed = DESTROYED.format(
        free=FREE if statistics_first else "true", whole=WHOLE if audited else "", audited=audited
    )
    parts = [claimed, locked, destroyed] if statistics_first else [claimed, destroyed, locked]
    return "".join(parts) + REDUCED.format(held_up=HELD_UP if statistics_first else NONE_HELD_UP)


class Position(NamedTuple):
    """Where a child has got to, in the order of the partial index; the time as PostgreSQL writes it."""

    expired: str
    id: int


START = Position("-infinity", LOWEST)


class Without(NamedTuple):
    """What is to be left alone: artifacts, and all of these projects."""

    artifacts: Collection[int] = ()
    projects: Collection[int] = ()


NOTHING = Without()


class Destroyed(NamedTuple):
    """What one batch came to; *reached* is None when there was nothing to claim.

    The artifacts of projects that are *held_up* were left: somebody has their statistics locked.
    """

    artifacts: int
    bytes: int
    reached: Position | None
    held_up: Sequence[int] = ()


def destroy_expired(
    number: int,
    now: datetime,
    after: Position,
    *,
    limit: int,
    grace: timedelta,
    only: Sequence[int] | None = None,
    without: Without = NOTHING,
    audit: Audit | None = None,
    brakes: Brakes | NoBrakes = NO_BRAKES,
) -> Destroyed:
    """Destroy up to *limit* expired artifacts of class *number* beyond *after*, oldest first.

    Their objects are recorded in the outbox, due after *grace*, and their bytes taken
    off their projects' statistics.  An artifact that its user keeps or locks before
    we have locked its row survives; rows that others hold locked are passed over, and
    so are artifacts whose project's statistics others hold locked.  The same statement
    says in the *audit* what it has destroyed, and settles what was reserved for it of limits.
    """
    of = None if only is None else len(only)
    values = {"grace": grace, "only": only, "room": brakes.room, **_values(number, now, after, limit, without)}
    values |= (audit.values if audit else {}) | brakes.values(of)
    audited = audit.clause(RECORD, "destroyed", id="id", name="file_final_path", **AUDITED) if audit else ""
    settled = brakes.settled("destroyed", size="size", part=of is not None)
    options = {"chosen": _chosen(only, without), "limited": brakes.room is not None, "audited": audited + settled}
    # Where statistics are locked, more of them may be in the next batch.
    row = _destroy(values, statistics_first=bool(without.projects), **options)
    brakes.went(Amount(*row[:2]) if row else NONE, of=of)
    return Destroyed(row[0], row[1], Position(*row[2:4]), row[4]) if row else Destroyed(0, 0, None)


def _destroy(values: dict[str, Any], *, statistics_first: bool, **options: Any) -> tuple[Any, ...] | None:
    text = Prepared("destroy_artifacts", statement(statistics_first=statistics_first, **options), first=PLANNED_ONCE)
    try:
        row: tuple[Any, ...] | None = database.execute_sql(text, values).fetchone()
    except pw.DataError as error:
        if statistics_first or sqlstate(error) != NO_ARRAY:
            raise
        # Whatever else of that kind it may have been, this statement says it again.
        return _destroy(values, statistics_first=True, **options)
    return row


def next_expired(
    number: int, now: datetime, after: Position, *, limit: int, without: Without = NOTHING
) -> list[Position]:
    """Return the places of what `destroy_expired` would take, locked or not."""
    statement = NEXT_EXPIRED.format(chosen=_chosen(None, without))
    rows = database.execute_sql(IN_ORDER + statement, _values(number, now, after, limit, without)).fetchall()
    return [Position(*row) for row in rows]


def next_sizes(number: int, now: datetime, after: Position, *, limit: int, without: Without = NOTHING) -> list[int]:
    """Return the bytes of each that `destroy_expired` would take now, at least 1."""
    statement = NEXT_SIZES.format(chosen=_chosen(None, without))
    rows = database.execute_sql(IN_ORDER + statement, _values(number, now, after, limit, without)).fetchall()
    return [size for (size,) in rows]


def still_expired(now: datetime, ids: Sequence[int]) -> set[int]:
    """Return those of *ids* that may be destroyed."""
    expired = JobArtifact.expired(now).select(JobArtifact.id)
    return {row.id for row in expired.where(JobArtifact.id.in_(list(ids)))}


def _chosen(only: Sequence[int] | None, without: Without) -> str:
    projects = " and project_id <> all(%(projects)s)" if without.projects else ""
    return chosen("id", only=only, without=without.artifacts) + projects


def _values(number: int, now: datetime, after: Position, limit: int, without: Without) -> dict[str, Any]:
    left = {"without": list(without.artifacts), "projects": list(without.projects)}
    return {"class": number, "now": now, "limit": limit, **left, **after._asdict()}

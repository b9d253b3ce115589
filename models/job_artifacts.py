"""CI job artifacts, what they add up to, and how an expired batch is destroyed (batch 11)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import LOWEST, Base, BigIdentityField, chosen, database, default, sqlstate
from forgekeeper.database.use import SEEN, WORK, Use

UNLOCKED, TRACE = 0, 3
TURNS = 0x6B656570
"""The advisory locks by which our children wait for one another, a project each: the letters ``keep``."""
CLASSES = 10
"""Artifacts fall into ten classes, ``(project_id + job_id) mod 10``; a bucket of five is two of them."""

OWN_FOLDER = re.compile(r"/([0-9]{1,18})/[^/]+\Z")
OLDEST_FOLDER = re.compile(r"\A[0-9]{4}_[0-9]{2}/[0-9]+/([0-9]{1,18})/[^/]+\Z")
"""Where a forge's uploader puts the file of an artifact that has no path: …/id/file; of old month/project/job/file."""

# All or nothing, and one statement: nothing can be destroyed without its object being
# recorded and its bytes taken off, and the counts are those of rows really deleted.
#
# Every bucket touches every project.  Children wait for one another by project, in one
# order, on locks that are ours alone (``turns``): without the order ten of them deadlock by
# the hundred.  Whoever else has a project's statistics locked then is not waited for: they may
# be kept for hours, and every bucket would stand still.  ``totals`` locks what it gets; what is
# there and was not got is ``locked``, and its artifacts stay for now.  One that has no
# statistics is not held up.  Each step names the count of the one before so that PostgreSQL
# cannot put that off.
#
# What has neither a final path nor a file has no object.  What has a file alone has one, but
# nobody here knows where: recording it raises, on purpose.
#
# Statistics may be stale or missing, and no batch may read everything that has expired
# because of it.  So the deletion names the ends of its batch, should it go through the
# index instead of by id; and the claim takes the index in its order, not by a bitmap
# that is sorted afterwards (`IN_ORDER`).
IN_ORDER = "set local enable_bitmapscan = off; "
EXPIRED = """mod(project_id + job_id, 10) = %(class)s and expire_at < %(now)s and locked = 0 and file_type <> 3
          and (expire_at, id) > (%(expired)s, %(id)s)"""
DESTROY_CHOSEN = f"""
    with claimed as materialized (
        select id, project_id, expire_at from ci_job_artifacts
        where {EXPIRED}{{chosen}}
        order by expire_at, id
        limit %(limit)s
        for update skip locked
    ), turns as materialized (
        select pg_advisory_xact_lock({TURNS}, project)
        from (select distinct hashint8(project_id) as project from claimed order by project) as projects
    ), totals as materialized (
        select project_id from project_statistics
        where (select count(*) from turns) >= 0
          and project_id = any(array(select distinct project_id from claimed))
        order by project_id
        for no key update skip locked
    ), held_up as materialized (
        select project_id from project_statistics
        where (select count(*) from totals) >= 0
          and project_id = any(array(select distinct project_id from claimed))
          and project_id <> all(array(select project_id from totals))
    ), destroyed as (
        delete from ci_job_artifacts
        where id = any(array(
            select id from claimed where project_id <> all(array(select project_id from held_up))
          ))
          and {EXPIRED}
          and (expire_at, id) <= (select expire_at, id from claimed order by expire_at desc, id desc limit 1)
        returning id, project_id, file_store, file, file_final_path, coalesce(size, 0) as size
    ), recorded as (
        insert into ci_deleted_objects (project_id, file_store, store_dir, file, pick_up_at)
        -- "/a" must not come out as "a": that would be somebody else's object.
        select project_id, file_store, coalesce(substring(file_final_path from '^(.+)/'), ''),
            case when file_final_path ~ '^/[^/]*$' then file_final_path
                 else substring(file_final_path from '[^/]*$') end,
            %(now)s + %(grace)s
        from destroyed where file_final_path is not null or file is not null
    ), reduced as (
        update project_statistics as total set build_artifacts_size = total.build_artifacts_size - gone.size
        from (select project_id, sum(size) as size from destroyed group by project_id) as gone
        where total.project_id = gone.project_id
    )
    select (select count(*) from destroyed), (select coalesce(sum(size), 0)::bigint from destroyed),
        expire_at::text, id, array(select project_id from held_up)
    from claimed order by claimed.expire_at desc, id desc limit 1
"""
DESTROY_EXPIRED = DESTROY_CHOSEN.format(chosen="")
NEXT_EXPIRED = f"""
    select expire_at::text, id from ci_job_artifacts
    where {EXPIRED}{{chosen}}
    order by ci_job_artifacts.expire_at, id
    limit %(limit)s
"""


LOCK_STATISTICS = "select project_id from project_statistics where project_id = any(%(projects)s) for no key update"
LOCK_NOT_AVAILABLE = "55P03"


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


class JobArtifact(Base):
    """A file that a CI job left behind."""

    found_by = ("id", "project_id", "job_id")
    used_by = Use(SEEN, (("update", ("id",), WORK), ("delete", (), WORK)))

    id = BigIdentityField()
    project_id = pw.BigIntegerField()
    job_id = pw.BigIntegerField()
    partition_id = pw.BigIntegerField(constraints=default("100"))
    file_type = pw.IntegerField()
    file_store = pw.IntegerField(constraints=default("1"))
    file = pw.TextField(null=True)
    file_final_path = pw.TextField(index=True)
    size = pw.BigIntegerField(null=True)
    expire_at = DateTimeTZField(null=True)
    locked = pw.SmallIntegerField(constraints=default("2"))
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "ci_job_artifacts"

    @classmethod
    def expired(cls, now: datetime) -> pw.ModelSelect[JobArtifact]:
        """Select what may be destroyed: past its time (strictly), unlocked for certain, and no trace."""
        return cls.select().where(cls.expire_at < now, cls.locked == UNLOCKED, cls.file_type != TRACE)

    @classmethod
    def destroy_expired(
        cls,
        number: int,
        now: datetime,
        after: Position,
        *,
        limit: int,
        grace: timedelta,
        only: Sequence[int] | None = None,
        without: Without = NOTHING,
    ) -> Destroyed:
        """Destroy up to *limit* expired artifacts of class *number* beyond *after*, oldest first.

        Their objects are recorded in the outbox, due after *grace*, and their bytes taken
        off their projects' statistics.  An artifact that its user keeps or locks before
        we have locked its row survives; rows that others hold locked are passed over, and
        so are artifacts whose project's statistics others hold locked.
        """
        values = {"grace": grace, "only": only, **_values(number, now, after, limit, without)}
        statement = DESTROY_CHOSEN.format(chosen=_chosen(only, without))
        row = database.execute_sql(IN_ORDER + statement, values).fetchone()
        return Destroyed(row[0], row[1], Position(*row[2:4]), row[4]) if row else Destroyed(0, 0, None)

    @classmethod
    def next_expired(
        cls, number: int, now: datetime, after: Position, *, limit: int, without: Without = NOTHING
    ) -> list[Position]:
        """Return the places of what `destroy_expired` would take, locked or not."""
        statement = NEXT_EXPIRED.format(chosen=_chosen(None, without))
        rows = database.execute_sql(IN_ORDER + statement, _values(number, now, after, limit, without)).fetchall()
        return [Position(*row) for row in rows]

    @classmethod
    def still_expired(cls, now: datetime, ids: Sequence[int]) -> set[int]:
        """Return those of *ids* that may be destroyed."""
        return {row.id for row in cls.expired(now).select(cls.id).where(cls.id.in_(list(ids)))}

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return those of *paths* that a live artifact still names.

        One without a path has its object in a folder of its own, called by its id, or by its
        job's in the oldest layout; whatever lies there is taken for named.
        """
        naming = cls.select(cls.file_final_path).where(cls.file_final_path.in_(list(paths)))
        named = {artifact.file_final_path for artifact in naming}
        for layout, column in ((OWN_FOLDER, cls.id), (OLDEST_FOLDER, cls.job_id)):
            folders = {path: int(found[1]) for path in paths if (found := layout.search(path))}
            if folders:
                pathless = column.in_(list(set(folders.values()))), pw.fn.coalesce(cls.file_final_path, "") == ""
                rows: Any = cls.select(column).where(*pathless).tuples()
                numbers = {number for (number,) in rows}
                named |= {path for path, number in folders.items() if number in numbers}
        return named


class ProjectStatistics(Base):
    """How many bytes a project's artifacts take up."""

    found_by = ("project_id",)
    used_by = Use(WORK, (("update", ("build_artifacts_size",), WORK),))

    project_id = pw.BigIntegerField(primary_key=True)
    build_artifacts_size = pw.BigIntegerField(constraints=default("0"))

    class Meta:
        table_name = "project_statistics"

    @classmethod
    def wait_for(cls, projects: Collection[int]) -> set[int]:
        """Wait until nobody has the statistics of *projects* locked; return those that stay locked.

        Nothing is held meanwhile.  The first that is not freed in time ends the waiting: it
        may be one of thousands that one session has locked.
        """
        left = sorted(projects)
        try:
            while left:
                database.execute_sql(LOCK_STATISTICS, {"projects": left[:1]})
                del left[0]
        except pw.OperationalError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
        free = database.execute_sql(f"{LOCK_STATISTICS} skip locked", {"projects": left}).fetchall()
        return set(left).difference(project for (project,) in free)


JobArtifact.add_index(
    pw.SQL(
        "create index ci_job_artifacts_expired on ci_job_artifacts"
        " (mod(project_id + job_id, 10), expire_at, id) where locked = 0 and file_type <> 3"
    )
)


def _chosen(only: Sequence[int] | None, without: Without) -> str:
    projects = " and project_id <> all(%(projects)s)" if without.projects else ""
    return chosen("id", only=only, without=without.artifacts) + projects


def _values(number: int, now: datetime, after: Position, limit: int, without: Without) -> dict[str, Any]:
    left = {"without": list(without.artifacts), "projects": list(without.projects)}
    return {"class": number, "now": now, "limit": limit, **left, **after._asdict()}

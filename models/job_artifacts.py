"""CI job artifacts, what they add up to, and how an expired batch is destroyed (batch 11)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from models.database import Base, BigIdentityField, database, default

UNLOCKED, TRACE = 0, 3
CLASSES = 10
"""Artifacts fall into ten classes, ``(project_id + job_id) mod 10``; a bucket of five is two of them."""

OWN_FOLDER = re.compile(r"/([0-9]{1,18})/[^/]+\Z")
OLDEST_FOLDER = re.compile(r"\A[0-9]{4}_[0-9]{2}/[0-9]+/([0-9]{1,18})/[^/]+\Z")
"""Where a forge's uploader puts the file of an artifact that has no path: …/id/file; of old month/project/job/file."""

# All or nothing, and one statement: nothing can be destroyed without its object being
# recorded and its bytes taken off, and the counts are those of rows really deleted.
#
# ``totals`` locks the projects' statistics in one order before anything is deleted: every
# bucket touches every project, and without the order ten of them deadlock by the hundred.
# The deletion names its count so that PostgreSQL cannot put it off.
#
# Statistics may be stale or missing, and no batch may read everything that has expired
# because of it.  So the deletion names the ends of its batch, should it go through the
# index instead of by id; and the claim takes the index in its order, not by a bitmap
# that is sorted afterwards (`IN_ORDER`).
IN_ORDER = "set local enable_bitmapscan = off; "
DESTROY_EXPIRED = """
    with claimed as materialized (
        select id, project_id, expire_at from ci_job_artifacts
        where mod(project_id + job_id, 10) = %(class)s and expire_at < %(now)s and locked = 0 and file_type <> 3
          and (expire_at, id) > (%(expired)s, %(id)s)
        order by expire_at, id
        limit %(limit)s
        for update skip locked
    ), totals as materialized (
        select project_id from project_statistics
        where project_id = any(array(select distinct project_id from claimed))
        order by project_id
        for update
    ), destroyed as (
        delete from ci_job_artifacts
        where (select count(*) from totals) >= 0 and id = any(array(select id from claimed))
          and mod(project_id + job_id, 10) = %(class)s and expire_at < %(now)s and locked = 0 and file_type <> 3
          and (expire_at, id) > (%(expired)s, %(id)s)
          and (expire_at, id) <= (select expire_at, id from claimed order by expire_at desc, id desc limit 1)
        returning id, project_id, file_store, file_final_path, coalesce(size, 0) as size
    ), recorded as (
        insert into ci_deleted_objects (project_id, file_store, store_dir, file, pick_up_at)
        -- "/a" must not come out as "a": that would be somebody else's object.
        select project_id, file_store, coalesce(substring(file_final_path from '^(.+)/'), ''),
            case when file_final_path ~ '^/[^/]*$' then file_final_path
                 else substring(file_final_path from '[^/]*$') end,
            %(now)s + %(grace)s
        from destroyed
    ), reduced as (
        update project_statistics as total set build_artifacts_size = total.build_artifacts_size - gone.size
        from (select project_id, sum(size) as size from destroyed group by project_id) as gone
        where total.project_id = gone.project_id
    )
    select (select count(*) from destroyed), (select coalesce(sum(size), 0)::bigint from destroyed), expire_at, id
    from claimed order by expire_at desc, id desc limit 1
"""


class Position(NamedTuple):
    """Where a child has got to, in the order of the partial index."""

    expired: datetime | str
    id: int


START = Position("-infinity", 0)


class Destroyed(NamedTuple):
    """What one batch came to; *reached* is None when there was nothing to claim."""

    artifacts: int
    bytes: int
    reached: Position | None


class JobArtifact(Base):
    """A file that a CI job left behind."""

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
    def destroy_expired(cls, number: int, now: datetime, after: Position, *, limit: int, grace: timedelta) -> Destroyed:
        """Destroy up to *limit* expired artifacts of class *number* beyond *after*, oldest first.

        Their objects are recorded in the outbox, due after *grace*, and their bytes taken
        off their projects' statistics.  An artifact that its user keeps or locks before
        we have locked its row survives; rows that others hold locked are passed over.
        """
        values = {"class": number, "now": now, "limit": limit, "grace": grace, **after._asdict()}
        row = database.execute_sql(IN_ORDER + DESTROY_EXPIRED, values).fetchone()
        return Destroyed(row[0], row[1], Position(*row[2:])) if row else Destroyed(0, 0, None)

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return those of *paths* that a live artifact still names.

        One without a path has its object in a folder of its own, called by its id, or by its
        job's in the oldest layout; whatever lies there is taken for named.
        """
        named = {artifact.file_final_path for artifact in cls.select().where(cls.file_final_path.in_(list(paths)))}
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

    project_id = pw.BigIntegerField(primary_key=True)
    build_artifacts_size = pw.BigIntegerField(constraints=default("0"))

    class Meta:
        table_name = "project_statistics"


JobArtifact.add_index(
    pw.SQL(
        "create index ci_job_artifacts_expired on ci_job_artifacts"
        " (mod(project_id + job_id, 10), expire_at, id) where locked = 0 and file_type <> 3"
    )
)

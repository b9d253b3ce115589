"""Projects, and the git refs that wait to be deleted from their repositories (batch 58)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from enum import IntEnum
from typing import NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, database, default
from forgekeeper.database.use import SEEN, WORK, Use

# One look into the index for each project, however many rows it has.
PROJECTS_WITH_PENDING = """
    with recursive waiting (project_id) as (
        (select project_id from batched_git_ref_updates_deletions
         where status = 1 and project_id > %(after)s and project_id <= %(until)s
         order by project_id limit 1)
        union all
        select (select next.project_id from batched_git_ref_updates_deletions as next
                where next.status = 1 and next.project_id > waiting.project_id and next.project_id <= %(until)s
                order by next.project_id limit 1)
        from waiting where waiting.project_id is not null
    )
    select project_id from waiting where project_id is not null limit %(limit)s
"""
SETTLE = """
    update batched_git_ref_updates_deletions as deletion
    set status = case when reasons.reason is null then 2 else 3 end, reason = reasons.reason,
        updated_at = clock_timestamp(),
        processed_at = case when reasons.reason is null then clock_timestamp() end
    from unnest(%(ids)s::bigint[], %(refs)s::text[], %(reasons)s::text[]) as reasons (id, ref, reason)
    where deletion.id = reasons.id and deletion.project_id = %(project)s and deletion.ref = reasons.ref
      and deletion.status = 1
    returning deletion.status
"""

# A look into the key for each; the number of the look makes PostgreSQL draw anew.
SAMPLE = """
    select distinct project.id, project.disk_path
    from (select max(id) as last from projects) as ids, generate_series(1, %(size)s) as look, lateral (
        select id, disk_path from projects
        where id >= ceil(random() * ids.last) + 0 * look
        order by id
        limit 1
    ) as project
"""


LAST = 2**63 - 1
"""No project's id is above it."""


class Settled(NamedTuple):
    """How many deletions were closed, by how."""

    processed: int
    rejected: int


class Closed(NamedTuple):
    """A deletion that has been made, or is refused for a reason."""

    id: int
    ref: str
    reason: str | None = None


class DeletionStatus(IntEnum):
    """What has become of a request to delete a ref."""

    PENDING = 1
    PROCESSED = 2
    REJECTED = 3


class Project(Base):
    """A project and where its bare repository lies below the repositories' root."""

    found_by = ("id",)
    used_by = Use(SEEN)

    id = pw.BigIntegerField(primary_key=True)
    disk_path = pw.TextField(unique=True)

    class Meta:
        table_name = "projects"

    @classmethod
    def paths(cls, ids: Sequence[int]) -> dict[int, str]:
        """Return where the repositories of those of these projects lie that there are, below the root."""
        return {project.id: project.disk_path for project in cls.select().where(cls.id.in_(list(ids)))}

    @classmethod
    def sample(cls, size: int) -> dict[int, str]:
        """Return the paths of up to *size* projects, taken at random from all over the table."""
        return dict(database.execute_sql(SAMPLE, {"size": size}).fetchall())


class GitRefDeletion(Base):
    """A ref that its project wants deleted.  No foreign key: the project may go first."""

    found_by = ("id", "project_id")
    used_by = Use(SEEN, (("update", ("status", "reason", "updated_at", "processed_at"), WORK), ("delete", (), WORK)))

    id = BigIdentityField()
    project_id = pw.BigIntegerField()
    ref = pw.TextField()
    expected_oid = pw.TextField(null=True)
    status = pw.SmallIntegerField(constraints=default("1"))
    reason = pw.TextField(null=True)
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))
    processed_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "batched_git_ref_updates_deletions"

    @classmethod
    def pending(cls) -> pw.ModelSelect[GitRefDeletion]:
        """Select the deletions that nobody has made yet."""
        return cls.select().where(cls.status == DeletionStatus.PENDING)

    @classmethod
    def pending_of(
        cls,
        project_id: int,
        *,
        after: int,
        limit: int,
        only: Sequence[int] | None = None,
        without: Collection[int] = (),
    ) -> list[GitRefDeletion]:
        """Return up to *limit* pending deletions of the project with an id above *after*, in their order."""
        fields = (cls.id, cls.project_id, cls.ref, cls.expected_oid)
        query = cls._pending_of(project_id, after, limit, without).select(*fields)
        return list(query if only is None else query.where(cls.id.in_(list(only))))

    @classmethod
    def next_pending_of(cls, project_id: int, *, after: int, limit: int, without: Collection[int] = ()) -> list[int]:
        """Return the ids of what `pending_of` would return."""
        query = cls._pending_of(project_id, after, limit, without).select(cls.id)
        return [row.id for row in query]

    @classmethod
    def _pending_of(
        cls, project_id: int, after: int, limit: int, without: Collection[int]
    ) -> pw.ModelSelect[GitRefDeletion]:
        query = cls.pending().where(cls.project_id == project_id, cls.id > after)
        if without:
            query = query.where(cls.id.not_in(list(without)))
        return query.order_by(cls.project_id, cls.id).limit(limit)

    @classmethod
    def still_pending(cls, ids: Sequence[int]) -> set[int]:
        """Return those of *ids* that are pending."""
        return {row.id for row in cls.pending().select(cls.id).where(cls.id.in_(list(ids)))}

    @classmethod
    def projects(cls, *, after: int, until: int = LAST, limit: int) -> list[int]:
        """Return up to *limit* ids of projects with pending deletions, above *after* and not above *until*."""
        values = {"after": after, "until": until, "limit": limit}
        return [project_id for (project_id,) in database.execute_sql(PROJECTS_WITH_PENDING, values).fetchall()]

    @classmethod
    def settle(cls, project_id: int, closed: Sequence[Closed]) -> Settled:
        """Close the project's deletions: rejected where there is a reason, else processed.

        One that somebody has closed meanwhile stays as it is, and is not counted.  Nor is one of
        another project or ref, which has the id in a database that came back older.
        """
        ids, refs, reasons = zip(*closed, strict=True) if closed else ((), (), ())
        values = {"project": project_id, "ids": list(ids), "refs": list(refs), "reasons": list(reasons)}
        statuses = [status for (status,) in database.execute_sql(SETTLE, values).fetchall()]
        rejected = statuses.count(DeletionStatus.REJECTED)
        return Settled(processed=len(statuses) - rejected, rejected=rejected)

    @classmethod
    def rejected(cls) -> pw.ModelSelect[GitRefDeletion]:
        """Select the deletions that were refused, with their reasons."""
        return cls.select().where(cls.status == DeletionStatus.REJECTED).order_by(cls.id)

    @classmethod
    def retry(cls, ids: Sequence[int] | None) -> int:
        """Let rejected deletions be tried anew, all of them if *ids* is None; return how many."""
        which = cls.status == DeletionStatus.REJECTED
        if ids is not None:
            which &= cls.id.in_(list(ids))
        values = {"status": DeletionStatus.PENDING, "reason": None, "updated_at": pw.fn.clock_timestamp()}
        return int(cls.update(values).where(which).execute())

    @classmethod
    def processed_before(cls, horizon: datetime) -> pw.ModelSelect[GitRefDeletion]:
        """Select the deletions that were made before *horizon*."""
        return cls.select().where(cls.status == DeletionStatus.PROCESSED, cls.processed_at < horizon)


GitRefDeletion.add_index(
    pw.SQL(
        "create index batched_git_ref_updates_deletions_pending"
        " on batched_git_ref_updates_deletions (project_id, id) where status = 1"
    )
)
GitRefDeletion.add_index(
    pw.SQL(
        "create index batched_git_ref_updates_deletions_processed"
        " on batched_git_ref_updates_deletions (processed_at) where status = 2"
    )
)

"""The rows of batch 58: which projects have pending ones, a page of them, and how they are closed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import peewee as pw

from forgekeeper.api.items import Page
from forgekeeper.api.shown import Entry
from forgekeeper.ledger.holds import Batch
from forgekeeper.platform.database import database, exclusions
from forgekeeper.platform.settings import Settings
from models import DeletionStatus, GitRefDeletion

NAME, RECORD = "git_ref_cleanup", "git_ref_deletion"
LAST = 2**63 - 1
"""No project's id is above it."""

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
# By project and ref as well: in a database that came back older another's row may have the id.
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
# A row that others have locked is not waited for: its ref is deleted at the value of this look all the same.
RECORD_FIRST_LOOK = """
    with seen as materialized (
        select deletion.id, oid
        from unnest(%(ids)s::bigint[], %(oids)s::text[]) as looked (id, oid)
            join batched_git_ref_updates_deletions as deletion using (id)
        where deletion.project_id = %(project)s and deletion.status = 1 and deletion.expected_oid is null
        for no key update of deletion skip locked
    )
    update batched_git_ref_updates_deletions as deletion set expected_oid = seen.oid
    from seen where deletion.id = seen.id and deletion.status = 1
"""
OID = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""The value of a ref that is not symbolic."""


class Pending(NamedTuple):
    """A pending deletion; a page of ten thousand models takes twice the time and the memory."""

    id: int
    project_id: int
    ref: str
    expected_oid: str | None
    created_at: datetime
    updated_at: datetime


def waiting_projects(*, after: int, until: int = LAST, limit: int) -> list[int]:
    """Return up to *limit* ids of projects with pending deletions, above *after* and not above *until*."""
    values = {"after": after, "until": until, "limit": limit}
    return [project_id for (project_id,) in database.execute_sql(PROJECTS_WITH_PENDING, values).fetchall()]


def pages(batch: str, size: int, most: int) -> Iterator[list[int]]:
    """Yield pages of projects with pending rows, once round from where the last run of *batch* ended, *most* in all.

    Where the run is, is written down once a page is done: a page that is cut off comes again.
    """
    began = Batch.position(batch)
    for after, last in ((began, LAST), (0, began)):
        position = after
        while most and (projects := waiting_projects(after=position, until=last, limit=min(size, most))):
            yield projects
            most, position = most - len(projects), projects[-1]
            Batch.move_to(batch, position)


def due(batch: str) -> pw.ModelSelect[GitRefDeletion]:
    """Select the pending deletions that nobody excludes of the batch."""
    return GitRefDeletion.pending().where(exclusions.but(_excluded(batch)))


def excluded(batch: str) -> pw.ModelSelect[GitRefDeletion]:
    """Select the pending deletions that people exclude of the batch."""
    return GitRefDeletion.pending().where(_excluded(batch))


def not_excluded(batch: str, page: Sequence[Pending]) -> list[Pending]:
    """Return those of a page that nobody excludes of the batch."""
    kept = exclusions.among(batch, lambda: [(row.project_id, row.ref) for row in page])
    return [row for place, row in enumerate(page) if place not in kept]


def pending_of(project_id: int, page: Page) -> list[Pending]:
    """Return a page of the project's pending deletions, in the order of their ids."""
    row = GitRefDeletion
    columns = row.id, row.project_id, row.ref, row.expected_oid, row.created_at, row.updated_at
    # Peewee's own rows, tuples too, take three times as long as the cursor's.
    return [Pending(*found) for found in database.execute(_pending_of(project_id, page).select(*columns))]


def next_pending_of(project_id: int, page: Page) -> list[int]:
    """Return the ids of what `pending_of` would return."""
    return [row.id for row in _pending_of(project_id, page).select(GitRefDeletion.id)]


def still_pending(project_id: int, ids: Sequence[int]) -> set[int]:
    """Return those of *ids* that are pending deletions of the project; nothing is locked."""
    row = GitRefDeletion
    query = row.pending().where(row.project_id == project_id, row.id.in_(list(ids)))
    return {number for (number,) in database.execute(query.select(row.id))}


def record_first_look(project_id: int, values: Mapping[Pending, str]) -> None:
    """Record the value that each ref has as the oid that its row expects, unless the row expects one already.

    From then on a push to the ref wins, even if this process dies before git deletes the ref: the next look finds the
    ref moved.  Rows that are closed or locked stay as they are.
    """
    seen = {row.id: oid for row, oid in values.items() if row.expected_oid is None and OID.fullmatch(oid)}
    if seen:
        parameters = {"project": project_id, "ids": list(seen), "oids": list(seen.values())}
        database.execute_sql(RECORD_FIRST_LOOK, parameters)


def settle(project_id: int, reasons: Mapping[Pending, str | None]) -> tuple[int, int]:
    """Close the project's deletions: processed, or rejected where there is a reason; return how many of either.

    One that was closed meanwhile stays as it is, and is not counted; nor is one of another project or ref.
    """
    ids, refs = [row.id for row in reasons], [row.ref for row in reasons]
    values = {"project": project_id, "ids": ids, "refs": refs, "reasons": list(reasons.values())}
    statuses = [status for (status,) in database.execute_sql(SETTLE, values).fetchall()]
    return statuses.count(DeletionStatus.PROCESSED), statuses.count(DeletionStatus.REJECTED)


def retry(ids: Sequence[int] | None) -> int:
    """Let rejected deletions be tried again, all of them if *ids* is None; return how many."""
    values = {"status": DeletionStatus.PENDING, "reason": None, "updated_at": pw.fn.clock_timestamp()}
    return int(GitRefDeletion.update(values).where(_refused(ids)).execute())


def discard(ids: Sequence[int] | None) -> int:
    """Remove rejected deletions, all of them if *ids* is None; return how many.  Their refs stay."""
    return int(GitRefDeletion.delete().where(_refused(ids)).execute())


def rejected(_settings: Settings, limit: int) -> Iterator[Entry]:
    """Yield up to *limit* deletions that were refused."""
    for row in GitRefDeletion.rejected().limit(limit):
        said = f"{row.reason}: {row.ref} of project {row.project_id}"
        yield Entry(str(row.id), f"{said} at {row.expected_oid}" if row.expected_oid else said, 1, row.updated_at)


def _refused(ids: Sequence[int] | None) -> pw.Expression:
    which: pw.Expression = GitRefDeletion.status == DeletionStatus.REJECTED
    return which if ids is None else which & GitRefDeletion.id.in_(list(ids))


def _excluded(batch: str) -> pw.Node:
    return exclusions.excluded(batch, project=GitRefDeletion.project_id, name=GitRefDeletion.ref)


def _pending_of(project_id: int, page: Page) -> pw.ModelSelect[GitRefDeletion]:
    row = GitRefDeletion
    query = row.pending().where(row.project_id == project_id, row.id > page.after)
    if page.only is not None:
        query = query.where(row.id.in_(list(page.only)))
    if page.without:
        query = query.where(row.id.not_in(list(page.without)))
    return query.order_by(row.project_id, row.id).limit(page.limit)

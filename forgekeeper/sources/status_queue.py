"""Pending refs in a table: find projects, read a project's rows, close them as processed or rejected.

No row is claimed: a child's lease is the claim of all rows of its project.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.api.inspection import RefusedEntry
from forgekeeper.api.refs import Refs
from forgekeeper.platform.database import database, exclusions, survey
from forgekeeper.platform.database.arrays import format_array, split_into_parts
from forgekeeper.platform.database.naming import quote_name, relation_name
from forgekeeper.platform.database.queries import KeyPage
from forgekeeper.platform.database.sessions import Statement, execute_in_one_request, execute_prepared

MAX_PROJECT_ID = 2**63 - 1
MAX_REFS_PER_STATEMENT = 2_500
"""Maximum refs per statement: the text of the statement has all their values."""

# One index lookup for each project, regardless of the number of its rows.
SELECT_PROJECTS_WITH_PENDING = """
    with recursive waiting (project_id) as (
        (select {project} from {table}
         where {status} = {pending} and {project} > %(after)s and {project} <= %(until)s
         order by {project} limit 1)
        union all
        select (select next.{project} from {table} as next
                where next.{status} = {pending} and next.{project} > waiting.project_id
                  and next.{project} <= %(until)s
                order by next.{project} limit 1)
        from waiting where waiting.project_id is not null
    )
    select project_id from waiting where project_id is not null limit %(limit)s
"""
SELECT_SMALL_PROJECTS = """
    select project from unnest(%(projects)s::bigint[]) as wanted (project)
    where (
        select count(*) from (
            select from {table} where {status} = {pending} and {project} = wanted.project limit %(most)s::integer + 1
        ) as first_rows
    ) <= %(most)s::integer
"""
SELECT_PAGES = """
    select queued.{key}, queued.{project}, queued.{ref}, queued.{expected}, queued.{created_at}, queued.{updated_at}
    from unnest(%(projects)s::bigint[]) as wanted (project), lateral (
        select * from {table} where {status} = {pending} and {project} = wanted.project order by {key} limit %(limit)s
    ) as queued
    order by queued.{key}
"""
SELECT_PATHS = "select {path_key}, {path} from {projects} where {path_key} = any(%(projects)s::bigint[])"
SELECT_STILL_AS_READ = f"""
    select {{key}} from {{table}}
    where {{status}} = {{pending}} and {{project}} = %(project)s::bigint and {{key}} = any(%(ids)s::bigint[])
    and exists (select from {{projects}} where {{path_key}} = %(project)s::bigint and {{path}} = %(path)s::text)
    and (%(may_be_excluded)s::boolean or not {exclusions.SELECT_HAS_EXCLUSIONS.replace("select exists", "exists", 1)})
"""
# Project and ref are compared, too: after a restore of an older database another row may have the id.
CLOSE_PENDING_ROWS = """
    with closed as (
        update {table} as deletion
        set {status} = case when reasons.reason is null then {processed} else {rejected} end, {reason} = reasons.reason,
            {updated_at} = clock_timestamp(),
            {processed_at} = case when reasons.reason is null then clock_timestamp() end
        from unnest(%(ids)s::bigint[], %(refs)s::text[], %(reasons)s::text[]) as reasons (id, ref, reason)
        where deletion.{key} = reasons.id and deletion.{project} = %(project)s::bigint and deletion.{ref} = reasons.ref
          and deletion.{status} = {pending}
        returning reasons.reason
    )
    select count(*) filter (where reason is null), count(reason) from closed
"""
# Locked rows are skipped without waiting: their refs are deleted at the value of this look all the same.
RECORD_EXPECTED_OIDS = """
    with seen as materialized (
        select deletion.{key} as id, oid
        from unnest(%(ids)s::bigint[], %(oids)s::text[]) as looked (id, oid)
            join {table} as deletion on deletion.{key} = looked.id
        where deletion.{project} = %(project)s::bigint and deletion.{status} = {pending} and deletion.{expected} is null
        for no key update of deletion skip locked
    )
    update {table} as deletion set {expected} = seen.oid
    from seen where deletion.{key} = seen.id and deletion.{status} = {pending}
"""
OBJECT_ID_PATTERN = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""An object id: the value of a ref that is not symbolic."""


class PendingRef(NamedTuple):
    """A pending row; a page of ten thousand models takes twice the time and the memory."""

    id: int
    project_id: int
    ref: str
    expected_oid: str | None
    created_at: datetime
    updated_at: datetime


class RefQueue:
    """The rows of *refs*, for its *batch*; each call is one statement of the transaction."""

    def __init__(self, refs: Refs[Any], batch: str) -> None:
        self._refs, self._queue, self._batch = refs, refs.source, batch
        self._key: pw.Field[Any] = refs.source.model._meta.primary_key

    @cached_property
    def _placeholders(self) -> dict[str, str | int]:
        """The names and states in the statements."""
        queue, refs = self._queue, self._refs
        columns = {"key": self._key, "project": refs.project, "ref": refs.ref, "expected": refs.expected}
        names_of_columns = "status", "reason", "created_at", "updated_at", "processed_at"
        columns |= {name: getattr(queue, name) for name in names_of_columns}
        path = self._refs.repository
        columns |= {"path": path, "path_key": path.model._meta.primary_key}
        states = {name: int(getattr(queue, name)) for name in ("pending", "processed", "rejected")}
        names = {name: quote_name(column.column_name) for name, column in columns.items()}
        tables = {"table": relation_name(queue.model), "projects": relation_name(path.model)}
        return {**tables, **names, **states}

    def find_waiting_projects(self, *, after: int, until: int = MAX_PROJECT_ID, limit: int) -> list[int]:
        """Return up to *limit* ids of projects with pending rows, above *after* and not above *until*."""
        values = {"after": after, "until": until, "limit": limit}
        return [project for (project,) in self._fetch_rows("waiting", SELECT_PROJECTS_WITH_PENDING, values)]

    def find_small_projects(self, projects: Sequence[int], *, most: int) -> set[int]:
        """Return the *projects* with at most that many pending rows."""
        found = self._fetch_rows("small", SELECT_SMALL_PROJECTS, {"projects": format_array(projects), "most": most})
        return {project for (project,) in found}

    def read_paths(self, projects: Sequence[int]) -> dict[int, str]:
        """Return the repositories' paths below the root by project, without missing projects."""
        return dict(self._fetch_rows("paths", SELECT_PATHS, {"projects": format_array(projects)}))

    def sample_paths(self) -> list[str]:
        """Return the paths of some projects' repositories."""
        column = self._refs.repository
        key, path = (quote_name(one.column_name) for one in (column.model._meta.primary_key, column))
        return survey.sample_rows(relation_name(column.model), key, path)

    def select_pending(self) -> pw.ModelSelect[Any]:
        """Select the pending rows."""
        return self._select_by_status(self._queue.pending)

    def select_rejected(self) -> pw.ModelSelect[Any]:
        """Select the rejected rows, with their reasons."""
        return self._select_by_status(self._queue.rejected).order_by(self._key)

    def select_not_excluded(self) -> pw.ModelSelect[Any]:
        """Select the pending rows that nobody excludes from the batch."""
        return self.select_pending().where(exclusions.is_not_true(self._excluded_condition))

    def select_excluded(self) -> pw.ModelSelect[Any]:
        """Select the pending rows that people exclude from the batch."""
        return self.select_pending().where(self._excluded_condition)

    def drop_excluded(self, page: Sequence[PendingRef]) -> list[PendingRef]:
        """Return the rows of a page that nobody excludes from the batch."""
        kept = self.find_excluded(page)
        return [row for place, row in enumerate(page) if place not in kept]

    def find_excluded(self, page: Sequence[PendingRef]) -> set[int]:
        """Return the places of the rows of a page that people exclude from the batch."""
        return exclusions.find_excluded(self._batch, lambda: [(row.project_id, row.ref) for row in page])

    def read_page(self, project: int, page: KeyPage) -> list[PendingRef]:
        """Return a page of the project's pending rows, in the order of their ids."""
        queue, refs = self._queue, self._refs
        columns = self._key, refs.project, refs.ref, refs.expected, queue.created_at, queue.updated_at
        # Peewee's own rows, tuples too, take three times as long as the cursor's.
        return [PendingRef(*row) for row in database.execute(self._select_page(project, page).select(*columns))]

    def read_pages(self, projects: Sequence[int], limit: int) -> dict[int, list[PendingRef]]:
        """Return up to *limit* pending rows of each project, in the order of their ids."""
        found: dict[int, list[PendingRef]] = {project: [] for project in projects}
        for row in self._fetch_rows("pages", SELECT_PAGES, {"projects": format_array(projects), "limit": limit}):
            found[row[1]].append(PendingRef(*row))
        return found

    def read_keys(self, project: int, page: KeyPage) -> list[int]:
        """Return the ids of the rows that `read_page` would return."""
        return [key for (key,) in database.execute(self._select_page(project, page).select(self._key))]

    def has_exclusions(self) -> bool:
        """Return whether people exclude anything from the batch."""
        return exclusions.has_exclusions(self._batch)

    def find_still_as_read(
        self, project: int, ids: Sequence[int], *, path: str | None, may_be_excluded: bool
    ) -> set[int]:
        """Return the *ids* that are pending rows of the project; none if it has another *path* by now.

        None, too, if people exclude anything from the batch now, unless rows *may_be_excluded*.
        """
        values = {"project": project, "ids": format_array(ids), "path": path, "may_be_excluded": may_be_excluded}
        values |= {"batch": self._batch, "kinds": list(exclusions.EXCLUSION_KINDS)}
        return {key for (key,) in self._fetch_rows("still_as_read", SELECT_STILL_AS_READ, values)}

    def record_expected_oids(self, project: int, values: Iterable[tuple[PendingRef, str]]) -> Iterator[Statement]:
        """Yield statements that record each ref's value as the expected object id of its row, unless it has one.

        From then on a push to the ref wins, even if this process dies before git deletes the ref: the next look finds
        the ref moved.  Rows that are closed or locked stay as they are.
        """
        seen = ((row.id, oid) for row, oid in values if row.expected_oid is None and OBJECT_ID_PATTERN.fullmatch(oid))
        text = self._write_statement(RECORD_EXPECTED_OIDS)
        for some in map(dict, split_into_parts(seen, MAX_REFS_PER_STATEMENT)):
            parameters = {"project": project, "ids": format_array(some), "oids": format_array(some.values())}
            yield Statement("expected", text, parameters)

    def settle(
        self, project: int, reasons: Mapping[PendingRef, str | None], *, first: Sequence[Statement] = ()
    ) -> tuple[int, int]:
        """Close the project's rows: rejected if there is a reason, else processed; return the number of each.

        The statements *first* are executed before, in the request of the first rows.  Rows that another process has
        closed, and rows that now have another project or ref, are left unchanged and not counted.
        """
        closed = Counter[str]()
        for some in map(dict, split_into_parts(reasons.items(), MAX_REFS_PER_STATEMENT)):
            ids, refs = format_array(row.id for row in some), format_array(row.ref for row in some)
            values = {"project": project, "ids": ids, "refs": refs, "reasons": format_array(some.values())}
            statement = Statement("close", self._write_statement(CLOSE_PENDING_ROWS), values)
            processed, rejected = execute_in_one_request([*first, statement]).fetchone()
            first = ()
            closed.update(processed=processed, rejected=rejected)
        return closed["processed"], closed["rejected"]

    def retry(self, ids: Sequence[int] | None) -> int:
        """Make rejected rows pending again, all of them if *ids* is None; return the number."""
        queue = self._queue
        values = {queue.status: queue.pending, queue.reason: None, queue.updated_at: pw.fn.clock_timestamp()}
        return int(queue.model.update(values).where(self._is_rejected(ids)).execute())

    def discard(self, ids: Sequence[int] | None) -> int:
        """Delete rejected rows, all of them if *ids* is None; return the number.  Refs stay."""
        return int(self._queue.model.delete().where(self._is_rejected(ids)).execute())

    def list_entries(self, limit: int) -> Iterator[RefusedEntry]:
        """Yield up to *limit* rejected rows, the oldest first."""
        queue, refs = self._queue, self._refs
        columns = self._key, queue.reason, refs.ref, refs.project, refs.expected, queue.updated_at
        query = self.select_rejected().select(*columns).limit(limit)
        for key, reason, ref, project, expected, since in database.execute(query):
            sentence = f"{reason}: {ref} of project {project}"
            yield RefusedEntry(str(key), f"{sentence} at {expected}" if expected else sentence, 1, since)

    @property
    def _excluded_condition(self) -> pw.Node:
        return exclusions.excluded_condition(self._batch, project=self._refs.project, name=self._refs.ref)

    def _select_by_status(self, state: int) -> pw.ModelSelect[Any]:
        query: pw.ModelSelect[Any] = self._queue.model.select().where(self._queue.status == state)
        return query

    def _is_rejected(self, ids: Sequence[int] | None) -> pw.Expression:
        is_rejected: pw.Expression = self._queue.status == self._queue.rejected
        return is_rejected if ids is None else is_rejected & self._key.in_(list(ids))

    def _select_page(self, project: int, page: KeyPage) -> pw.ModelSelect[Any]:
        query = self.select_pending().where(self._refs.project == project, self._key > page.after)
        if page.only is not None:
            query = query.where(self._key.in_(list(page.only)))
        if page.without:
            query = query.where(self._key.not_in(list(page.without)))
        return query.order_by(self._refs.project, self._key).limit(page.limit)

    def _fetch_rows(self, name: str, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = execute_prepared(name, self._write_statement(statement), values).fetchall()
        return rows

    def _write_statement(self, statement: str) -> str:
        return statement.format(**self._placeholders)

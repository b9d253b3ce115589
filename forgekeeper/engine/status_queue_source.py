"""A status queue as a source of refs: the pending rows of a project, which are closed as processed or rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from forgekeeper.api.answers import Mistake
from forgekeeper.api.refs import Refs
from forgekeeper.audit.deletions import AuditItem
from forgekeeper.engine.ref_target import RefTarget
from forgekeeper.engine.run import RECORD_ERRORS, Run, is_record_error
from forgekeeper.engine.source import KeyedSource
from forgekeeper.engine.target import ItemState
from forgekeeper.guards.repositories import require_repositories
from forgekeeper.platform.database.queries import KeyPage, filter_keys
from forgekeeper.platform.database.sessions import Statement
from forgekeeper.sources.status_queue import MAX_REFS_PER_STATEMENT, PendingRef, RefQueue

MAX_SHARED_ROWS = 50
"""Rows of a project that one read returns for all children of a message; a project with as many reads its own."""


class StatusQueueSource(KeyedSource[PendingRef]):
    """The pending refs of a project, for one run of its child; the project's lease is their claim.

    Raises `Blocked` if no repositories are configured, and `Mistake` outside a child.
    """

    fails_with_chunk = claims_all_due = True
    max_items_per_request = MAX_REFS_PER_STATEMENT

    def __init__(self, refs: Refs[Any], run: Run[Any]) -> None:
        if run.lease is None:
            raise Mistake(f"{run.batch} returned Refs without a lease: return Refs from a child without records=")
        require_repositories(run.settings)
        self.record = refs.record
        # A whole page each time, though it may exceed the most: locking costs as much for one ref as for all.
        self.chunk_size = self.max_items = refs.most
        self._project = refs.of
        self._queue = run.read_once("queue", partial(RefQueue, refs, run.declared.batch.name))
        self._run = run
        self.target = RefTarget(refs, self._queue, run)

    def find_scope(self, one: PendingRef) -> str:
        return str(one.project_id)

    def exclusion_key(self, one: PendingRef) -> tuple[int, str]:
        return one.project_id, one.ref

    def item_key(self, one: PendingRef) -> int:
        return one.id

    def find_keys(self, page: KeyPage) -> list[int]:
        return self._queue.read_keys(self._project, page)

    def find_due(self, keys: Sequence[int]) -> set[int]:
        return filter_keys(self._queue.select_pending(), keys)

    def claim_next(self, page: KeyPage) -> list[PendingRef]:
        rows = self._find_shared_rows(page)
        return self._queue.read_page(self._project, page) if rows is None else rows

    def _find_shared_rows(self, page: KeyPage) -> list[PendingRef] | None:
        """Return the page's rows of the read that serves all children of the message; None if it lacks them."""
        if page.after or page.only is not None or page.without:
            return None
        rows = self._run.read_once("pending refs", self._read_shared_rows).get(self._project)
        return rows[: page.limit] if rows is not None and len(rows) < MAX_SHARED_ROWS else None

    def _read_shared_rows(self) -> dict[int, list[PendingRef]]:
        """Return the first rows of each project of the message; none if it has one, or a row that cannot be read."""
        projects = self._run.shared_ids
        try:
            return self._queue.read_pages(projects, MAX_SHARED_ROWS) if len(projects) > 1 else {}
        except RECORD_ERRORS as error:
            if not is_record_error(error):
                raise
            return {}

    def mark_for_deletion(
        self, items: Sequence[PendingRef], kept: Mapping[PendingRef, ItemState]
    ) -> dict[PendingRef, ItemState | None]:
        # Only git's deletion says which value each ref had.
        return {row: kept.get(row) for row in items}

    def record_observed_values(self, items: Mapping[PendingRef, AuditItem]) -> Iterator[Statement]:
        values = ((row, item.detail["oid"]) for row, item in items.items())
        return self._queue.record_expected_oids(self._project, values)

    def may_be_excluded(self) -> bool:
        return self._run.read_once("exclusions", self._queue.has_exclusions)

    def find_lost(self, items: Sequence[PendingRef]) -> list[PendingRef]:
        # Read for all children of the message, perhaps some seconds ago.
        ids, path, may_be_excluded = [row.id for row in items], self.target.find_path(), self.may_be_excluded()
        pending = self._queue.find_still_as_read(self._project, ids, path=path, may_be_excluded=may_be_excluded)
        if not pending and not may_be_excluded and self._queue.has_exclusions():
            pending = self._queue.find_still_as_read(self._project, ids, path=path, may_be_excluded=True)
            pending -= {items[place].id for place in self._queue.find_excluded(items)}
        return [row for row in items if row.id not in pending]

    def settle(self, states: Mapping[PendingRef, ItemState]) -> dict[str, int]:
        return self.settle_after((), states)

    def settle_after(self, first: Sequence[Statement], states: Mapping[PendingRef, ItemState]) -> dict[str, int]:
        reasons = {row: one.reason for row, one in states.items()}
        processed, rejected = self._queue.settle(self._project, reasons, first=first)
        if self.target.is_closed_without_git:
            return {"gone": processed}
        return {"total_deletes": processed, "rejected": rejected}

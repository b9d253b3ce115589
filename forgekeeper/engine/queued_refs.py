"""Refs that a queue names: read under the project's lease, deleted in one git transaction, closed in the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import structlog

from forgekeeper.api.answers import Backlog, Mistake, Rows
from forgekeeper.api.items import Deleted, Fence, Item, Items, Page, State
from forgekeeper.api.refs import Refs
from forgekeeper.api.shown import Refused, numbers
from forgekeeper.engine.run import Run
from forgekeeper.guards.repositories import require_repositories
from forgekeeper.platform.database import queries
from forgekeeper.platform.database.queries import Stake, among
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.status_queue import PendingRef, RefQueue
from forgekeeper.targets import git_refs, git_repository
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_refs import Doomed
from forgekeeper.targets.git_repository import RepositoryMissing
from forgekeeper.targets.repositories_root import prove_root

STOPPED_AT_MOST = "max_deletes"
"""The reason why a child stopped that leaves a successor."""

log = structlog.get_logger(__name__)


def bind_refs(refs: Refs[Any], run: Run[Any]) -> Items[PendingRef]:
    """Return the refs of an answer as items of one run; raise `Blocked` if no repositories are configured."""
    if run.lease is None:
        raise Mistake(f"{run.batch} answers with Refs: that is the answer of a child, and its records= is derived")
    require_repositories(run.settings)
    return _QueuedRefs(refs, run)


class _QueuedRefs(Items[PendingRef]):
    """The refs of a project, for one run of its child; if its repository is missing, their rows are closed.

    Raises `GitError` of the repository or the root as a whole: no row is closed, and the message is retried.
    """

    name = "ref"
    project = "project_id"
    at_most = STOPPED_AT_MOST
    gone = frozenset({"deleted", "gone"})
    stays = frozenset({"moved", "rejected"})
    all_bad = True

    def __init__(self, refs: Refs[Any], run: Run[Any]) -> None:
        self.record = refs.record
        # A whole page each time, though it may go beyond the most: locking costs as much for one ref as for all.
        self.chunk = self.most = refs.most
        self._project, self._missing, self._settings = refs.of, refs.missing, run.settings
        self._queue = RefQueue(refs, run.declared.batch.name)
        self._is_closed_without_git = False

    def due_of(self, keys: Sequence[int]) -> set[int]:
        return among(self._queue.pending(), keys)

    def key(self, one: PendingRef) -> int:
        return one.id

    def next(self, page: Page) -> list[int]:
        return self._queue.read_keys(self._project, page)

    def claim(self, page: Page) -> list[PendingRef]:
        # The project's lease is the claim.
        return self._queue.read_page(self._project, page)

    def scope(self, one: PendingRef) -> str:
        return str(one.project_id)

    def scopes(self) -> list[str]:
        return [str(self._project)]

    def became(self, _scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        # If git cannot read the repository, it is unknown.
        with suppress(GitError):
            there = git_repository.standing(*self._find_repository(), [row["ref"] for row in rows], until=until)
            values = [(row["oid"], there.get(row["ref"])) for row in rows]
            return ["deleted" if now is None else "kept" if now == was else "moved" for was, now in values]
        return [None] * len(rows)

    def mark(self, items: Sequence[PendingRef], kept: Mapping[PendingRef, State]) -> dict[PendingRef, State | None]:
        # Only git's deletion says which value each ref had.
        return {row: kept.get(row) for row in items}

    def record_look(self, items: Mapping[PendingRef, Item]) -> None:
        self._queue.record_first_look(self._project, {row: item.detail["oid"] for row, item in items.items()})

    def find_lost(self, items: Sequence[PendingRef]) -> list[PendingRef]:
        pending = self._queue.find_pending(self._project, [row.id for row in items])
        return [row for row in items if row.id not in pending]

    def delete(self, items: Sequence[PendingRef], fence: Fence[PendingRef]) -> Deleted[PendingRef]:
        doomed = {row: Doomed(row.ref, row.expected_oid) for row in items}
        has_begun = False

        def announce(values: Mapping[Doomed, str]) -> None:
            nonlocal has_begun
            has_begun = True
            fence.announce({row: _item(row, values[one]) for row, one in doomed.items() if one in values})

        def find_lost() -> list[Doomed]:
            return [doomed[row] for row in fence.find_lost(items)]

        try:
            outcomes = git_refs.delete(
                *self._find_repository(),
                list(doomed.values()),
                until=fence.until,
                announce=announce,
                find_lost=find_lost,
            )
        except GitError as error:
            if not self._may_close_without_git(error):
                return Deleted({}, error=error, began=has_begun)
            self._is_closed_without_git = True
            return Deleted(dict.fromkeys(items, git_refs.GONE), began=has_begun)
        self._log_locked([one for one in doomed.values() if outcomes[one].state == "locked"], outcomes)
        return Deleted({row: outcomes[one] for row, one in doomed.items()})

    def _may_close_without_git(self, error: GitError) -> bool:
        """Return whether there is no repository, and the batch or the deletion of the project says the same."""
        if not isinstance(error, RepositoryMissing):
            return False
        return self._missing or not self._queue.paths([self._project])

    def _log_locked(self, locked: Sequence[Doomed], outcomes: Mapping[Doomed, git_refs.Outcome]) -> None:
        if locked:
            reason = outcomes[locked[0]].reason
            log.warning("refs locked", project_id=self._project, refs=len(locked), first=locked[0].ref, reason=reason)

    def _find_repository(self) -> tuple[Path, str]:
        root, paths = prove_root(self._settings), self._queue.paths([self._project])
        if self._project not in paths:
            raise RepositoryMissing("there is no such project")
        return root, paths[self._project]

    def settle(self, states: Mapping[PendingRef, State]) -> dict[str, int]:
        reasons = {row: one.reason for row, one in states.items()}
        processed, rejected = self._queue.settle(self._project, reasons)
        if self._is_closed_without_git:
            return {"gone": processed}
        return {"total_deletes": processed, "rejected": rejected}

    def interrupted(self, _scope: str | None, error: Exception) -> Literal["deadline", "missing"]:
        if isinstance(error, GitTimedOut):
            log.warning("git ended, it took too long", project_id=self._project, error=str(error))
            return "deadline"
        if isinstance(error, RepositoryMissing):
            log.warning("repository missing, its rows are kept", project_id=self._project)
            return "missing"
        raise error


def _item(row: PendingRef, was: str) -> Item:
    return Item(row.id, row.ref, {"project_id": row.project_id, "ref": row.ref, "oid": was, "due": row.created_at})


def count_pending_refs(refs: Refs[Any], batch: str, _now: datetime) -> Backlog:
    """Count the pending rows; a row that a person let be retried counts from then."""
    return Backlog.of(RefQueue(refs, batch).not_excluded(), oldest=refs.source.updated_at)


def stake_of_refs(refs: Refs[Any], batch: str, _now: datetime) -> Stake:
    """Return the pending rows, of all rows: refs cannot be counted."""
    return Stake.rows(RefQueue(refs, batch).not_excluded())


def rejected_refs(refs: Refs[Any], batch: str) -> Refused:
    """Return the rejected rows as a part of the quarantine."""
    queue = RefQueue(refs, batch)
    return Refused(
        kind=refs.called,
        record=refs.rejected_record,
        count=lambda: queries.count(queue.rejected()),
        entries=lambda _settings, limit: queue.entries(limit),
        retry=lambda keys: queue.retry(numbers(keys)),
        discard=lambda keys: queue.discard(numbers(keys)),
    )


def pending_rows(refs: Refs[Any], _now: datetime, _settings: Settings) -> list[Rows[Any]]:
    """Return the pending rows, as `peek` shows them."""
    queue = refs.source
    return [Rows(queue.model, queue.status == queue.pending, since=queue.created_at, record=refs.record)]


def processed_rows(refs: Refs[Any], _now: datetime) -> Rows[Any]:
    """Return the processed rows that housekeeping deletes."""
    queue, record = refs.source, refs.processed_record
    is_processed = queue.status == queue.processed
    since, keep = queue.processed_at, queue.keep_processed
    return Rows(queue.model, is_processed, since=since, older_than=keep, record=record, counted=f"{record}s")

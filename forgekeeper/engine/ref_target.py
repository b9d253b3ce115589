"""Refs in git repositories as a target: the refs of a project are deleted in one git transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import structlog

from forgekeeper.api.refs import Refs
from forgekeeper.audit.deletions import AuditItem
from forgekeeper.engine.run import Run
from forgekeeper.engine.target import DeletionResult, Fence, ItemTarget
from forgekeeper.platform.installation import Installation
from forgekeeper.sources.status_queue import PendingRef, RefQueue
from forgekeeper.targets import git_refs, git_repository
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_refs import RefToDelete
from forgekeeper.targets.git_repository import RepositoryMissing
from forgekeeper.targets.repositories_root import prove_root

log = structlog.get_logger(__name__)


class RefTarget(ItemTarget[PendingRef]):
    """The repository of a project; if it is missing, the rows of its refs are closed.

    Raises `GitError` of the repository or the root as a whole: no row is closed, and the message is retried.
    """

    audit_key = "ref"

    def __init__(self, refs: Refs[Any], queue: RefQueue, run: Run[Any]) -> None:
        self.is_closed_without_git = False
        self._project, self._is_missing, self._record = refs.of, refs.missing, refs.record
        self._queue, self._run = queue, run

    def list_scopes(self) -> list[str]:
        found = self._run.read_once("scopes with intents", self._find_scopes_with_intents)
        return [scope] if (scope := str(self._project)) in found else []

    def _find_scopes_with_intents(self) -> set[str]:
        """Return the projects of the message's children with intents of dead attempts."""
        scopes = [str(one) for one in self._run.shared_ids]
        return self._run.audit.find_scopes_with_open_intents(self._record, scopes, now=self._run.now)

    def find_states_after_crash(
        self, _scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        # If git cannot read the repository, it is unknown.
        with suppress(GitError):
            there = git_repository.read_existing_refs(
                *self._find_repository(), [row["ref"] for row in rows], until=until
            )
            values = [(row["oid"], there.get(row["ref"])) for row in rows]
            return ["deleted" if now is None else "kept" if now == was else "moved" for was, now in values]
        return [None] * len(rows)

    def delete(
        self, _scope: str | None, items: Sequence[PendingRef], fence: Fence[PendingRef]
    ) -> DeletionResult[PendingRef]:
        doomed = {row: RefToDelete(row.ref, row.expected_oid) for row in items}
        has_begun = False

        def announce(values: Mapping[RefToDelete, str]) -> None:
            nonlocal has_begun
            has_begun = True
            fence.announce(_AuditItems(doomed, values))

        def find_lost() -> list[RefToDelete]:
            return [doomed[row] for row in fence.find_lost(items)]

        try:
            repository, page = self._find_repository(), list(doomed.values())
            outcomes = git_refs.delete_refs(
                *repository, page, until=fence.until, announce=announce, find_lost=find_lost
            )
        except GitError as error:
            if not self._may_close_without_git(error):
                return DeletionResult({}, error=error, has_begun=has_begun)
            self.is_closed_without_git = True
            return DeletionResult(dict.fromkeys(items, git_refs.REF_MISSING), has_begun=has_begun)
        if locked := [one for one in doomed.values() if outcomes[one].state == "locked"]:
            reason = outcomes[locked[0]].reason
            log.warning("refs locked", project_id=self._project, refs=len(locked), first=locked[0].ref, reason=reason)
        return DeletionResult({row: outcomes[one] for row, one in doomed.items()})

    def _may_close_without_git(self, error: GitError) -> bool:
        """Return whether there is no repository, and the batch or the deletion of the project says the same."""
        return isinstance(error, RepositoryMissing) and (
            self._is_missing or not self._queue.read_paths([self._project])
        )

    def _find_repository(self) -> tuple[Path, str]:
        find_installation = partial(self._run.read_once, "installation", Installation.ensure_id)
        root = prove_root(self._run.settings, find_installation)
        path = self.find_path()
        if path is None:
            raise RepositoryMissing("the project does not exist")
        return root, path

    def find_path(self) -> str | None:
        """Return the repository's path below the root, None without a project; read for all children of the message."""
        read = partial(self._queue.read_paths, self._run.shared_ids)
        return self._run.read_once("paths", read).get(self._project)

    def handle_error(self, _scope: str | None, error: Exception) -> Literal["deadline", "missing"]:
        if isinstance(error, GitTimedOut):
            log.warning("git timed out", project_id=self._project, error=str(error))
            return "deadline"
        if isinstance(error, RepositoryMissing):
            log.warning("repository missing, rows kept", project_id=self._project)
            return "missing"
        raise error


class _AuditItems(Mapping[PendingRef, AuditItem]):
    """Audit items of the rows whose refs have *values*; each is created when it is read, to save memory."""

    def __init__(self, doomed: Mapping[PendingRef, RefToDelete], values: Mapping[RefToDelete, str]) -> None:
        self._doomed, self._values = doomed, values

    def __getitem__(self, row: PendingRef) -> AuditItem:
        oid = self._values[self._doomed[row]]
        detail = {"project_id": row.project_id, "ref": row.ref, "oid": oid, "due": row.created_at}
        return AuditItem(row.id, row.ref, detail)

    def __iter__(self) -> Iterator[PendingRef]:
        return (row for row, one in self._doomed.items() if one in self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)

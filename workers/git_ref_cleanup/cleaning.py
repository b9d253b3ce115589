"""A child of batch 58: it deletes one project's refs, and closes their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import structlog

from forgekeeper import Items
from forgekeeper.audit.intents import Item
from forgekeeper.database.queries import among
from forgekeeper.declaring.items import Deleted, Page, State, Tell
from forgekeeper.deleting.work import settings
from forgekeeper.storage import git_refs, git_repository
from forgekeeper.storage.git_command import GitError, GitTimedOut
from forgekeeper.storage.git_repository import RepositoryMissing
from models import GitRefDeletion, Project
from workers.git_ref_cleanup import deletions, repositories
from workers.git_ref_cleanup.deletions import Pending

RECORD = "git_ref_deletion"
LOCK_TIMEOUT = timedelta(minutes=10)
MAX_DELETES = 10_000

log = structlog.get_logger(__name__)


@dataclass
class ProjectOutcome:
    """What a child comes to: rows whose refs are gone, rows refused, and rows that went with their repository."""

    total_deletes: int = 0
    rejected: int = 0
    stopped: Literal["drained", "max_deletes", "lease_held", "deadline", "missing"] = "drained"
    gone: int = 0


class ProjectRefs(Items[Pending]):
    """The refs that a project wants deleted, by its pending rows; where its repository is *missing*, these are closed.

    Raises `GitError` of the repository or the root as a whole: no row is consumed, and the message is retried.
    """

    record = RECORD
    name = "ref"
    at_most = "max_deletes"
    gone = frozenset({"deleted", "gone"})
    stays = frozenset({"moved", "rejected"})
    all_bad = True

    def __init__(self, project_id: int, *, missing: bool) -> None:
        self._project = project_id
        self._missing = missing
        self._repository_gone = False
        # A whole page each time, though it may go beyond the most: locking costs as much for one ref as for all.
        self.chunk = self.most = MAX_DELETES

    def due_of(self, keys: Sequence[int]) -> set[int]:
        """Return those that are pending."""
        return among(GitRefDeletion.pending(), keys)

    def key(self, one: Pending) -> int:
        """Return the row's id."""
        return one.id

    def next(self, page: Page) -> list[int]:
        """Return the ids of the rows that come next."""
        return deletions.next_pending_of(self._project, page)

    def claim(self, page: Page) -> list[Pending]:
        """Read the next rows: the project's lease is the claim."""
        return deletions.pending_of(self._project, page)

    def scope(self, one: Pending) -> str:
        """Return the project."""
        return str(one.project_id)

    def scopes(self) -> list[str]:
        """Return the project."""
        return [str(self._project)]

    def became(self, _scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Look into the repository: a ref that is gone was deleted; where git cannot read it, that is unknown."""
        with suppress(GitError):
            there = git_repository.standing(*self._where(), [row["ref"] for row in rows], until=until)
            now = [(row["oid"], there.get(row["ref"])) for row in rows]
            return ["deleted" if value is None else "kept" if value == was else "moved" for was, value in now]
        return [None] * len(rows)

    def mark(self, items: Sequence[Pending], kept: Mapping[Pending, State]) -> dict[Pending, State | None]:
        """Leave all to the deletion: only then git says what each ref was."""
        return {row: kept.get(row) for row in items}

    def delete(self, items: Sequence[Pending], until: float, tell: Tell[Pending] | None) -> Deleted[Pending]:
        """Delete the refs in one git transaction, where that can be."""
        doomed, begun = {row: git_refs.Doomed(row.ref, row.expected_oid) for row in items}, False

        def before(going: Mapping[git_refs.Doomed, str]) -> None:
            nonlocal begun
            begun = True
            if tell is not None:
                tell({row: _item(row, going[one]) for row, one in doomed.items() if one in going})

        try:
            outcomes = git_refs.delete(*self._where(), list(doomed.values()), until=until, before=before)
        except GitError as error:
            missing = isinstance(error, RepositoryMissing)
            if not missing or (not self._missing and repositories.paths([self._project])):
                return Deleted({}, error=error, began=begun)
            self._repository_gone = True
            return Deleted(dict.fromkeys(items, git_refs.GONE), began=begun)
        if locked := [one for one in doomed.values() if outcomes[one].state == "locked"]:
            reason = outcomes[locked[0]].reason
            log.warning("refs locked", project_id=self._project, refs=len(locked), first=locked[0].ref, reason=reason)
        return Deleted({row: outcomes[one] for row, one in doomed.items()})

    def _where(self) -> tuple[Path, str]:
        root, project = repositories.require_root(settings()), Project.get_or_none(Project.id == self._project)
        if project is None:
            raise RepositoryMissing("there is no such project")
        return root, project.disk_path

    def settle(self, states: Mapping[Pending, State]) -> dict[str, int]:
        """Close the rows."""
        processed, rejected = deletions.settle(self._project, {row: one.reason for row, one in states.items()})
        return {"gone": processed} if self._repository_gone else {"total_deletes": processed, "rejected": rejected}

    def interrupted(self, _scope: str | None, error: Exception) -> Literal["deadline", "missing"]:
        """End where git took too long or the repository is missing; else let the child fail."""
        if isinstance(error, GitTimedOut):
            log.warning("git ended, it took too long", project_id=self._project, error=str(error))
            return "deadline"
        if isinstance(error, RepositoryMissing):
            log.warning("repository missing, its rows are kept", project_id=self._project)
            return "missing"
        raise error


def _item(row: Pending, was: str) -> Item:
    return Item(row.id, row.ref, {"project_id": row.project_id, "ref": row.ref, "oid": was, "due": row.created_at})

"""The preview of refs: a look into the repositories for refs that are deleted, missing, rejected, moved or locked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forgekeeper.api.batches import batch_of
from forgekeeper.api.refs import Refs
from forgekeeper.api.shown import PASSED_OVER, Look, Part
from forgekeeper.platform.database import exclusions, queries
from forgekeeper.platform.database.queries import Page
from forgekeeper.platform.database.survey import expected, selected
from forgekeeper.sources.status_queue import PendingRef, RefQueue
from forgekeeper.targets import git_refs
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_refs import Doomed
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.missing_repositories import RepositoriesMissing, doubt_missing, find_missing
from forgekeeper.targets.repositories_root import prove_root

PROJECTS_PER_PAGE, REFS_PER_PAGE = 100, 10_000
MISSING, FAILED, UNSEEN = "repository_missing", "repository_failed", "repositories_unseen"
"""Reasons why rows stay."""


def preview_refs(refs: Refs[Any], look: Look) -> Iterator[Part]:
    """Count the refs that a run would delete, and the rows that it would close without a repository."""
    part = look.part(refs.record)
    closed = look.part(refs.record_without_repository, verb="closed, as there is no repository")
    batch, bad = batch_of(look.batch), look.passed_over(part.record)
    queue = RefQueue(refs, batch)
    pending = selected(queue.not_excluded(), refs.source.updated_at)
    part.keep(exclusions.REASON, queries.count(queue.excluded()))
    try:
        if not _RefPreview(queue, look, bad, part, closed).look_into_all(prove_root(look.settings)):
            part.guess(expected(pending, bad))
        part.keep(PASSED_OVER, pending.among(bad))
    except RootUnavailable:
        part.kept[UNSEEN] = None
        look.count(part, pending)
        part.estimate = True
    yield part
    yield closed


class _RefPreview:
    """One preview: *part* counts the refs, *closed* the rows that are closed without a repository."""

    def __init__(self, queue: RefQueue, look: Look, bad: Collection[int], part: Part, closed: Part) -> None:
        self._queue, self._asked, self._bad, self._part, self._closed = queue, look, bad, part, closed

    def look_into_all(self, root: Path) -> bool:
        """Look into one repository after another; return False if the time was up first."""
        paths, missing, after = dict[int, str | None](), dict[int, str](), 0
        while projects := self._queue.waiting_projects(after=after, limit=PROJECTS_PER_PAGE):
            if self._asked.over():
                return False
            found = self._queue.paths(projects)
            paths |= dict.fromkeys(projects) | found
            missing |= find_missing(root, found)
            after = projects[-1]
        closed = {project for project, path in paths.items() if path is None}
        closed |= missing.keys() if self._is_believed(root, missing, len(paths)) else set()
        return all(self._look_into(root, project, path, closed, missing) for project, path in paths.items())

    def _is_believed(self, root: Path, missing: dict[int, str], projects: int) -> bool:
        """Return whether a run would believe that the repositories are deleted."""
        with suppress(RepositoriesMissing):
            share = self._asked.settings.missing_repositories
            doubt_missing(root, missing, projects=projects, share=share, batch=self._asked.batch)
            return True
        return False

    def _look_into(
        self, root: Path, project: int, path: str | None, closed: Collection[int], missing: Collection[int]
    ) -> bool:
        """Count the rows of a project page by page; return False if the time was up first."""
        after, look = 0, self._asked
        while page := self._queue.read_page(project, Page(REFS_PER_PAGE, after, without=self._bad)):
            if look.over():
                return False
            after, rows = page[-1].id, self._queue.remove_excluded(page)
            if path is None or project in closed:
                for row in rows:
                    self._closed.one(str(row.id), row.ref, row.updated_at, size=look.size, project=project)
            elif project in missing:
                self._part.keep(MISSING, len(rows))
            elif rows and not self._look_at(root, path, rows):
                return False
            look.told(self._part)
        return True

    def _look_at(self, root: Path, path: str, rows: Sequence[PendingRef]) -> bool:
        """Count a page's rows by git's expected results; return False if the time was up first."""
        doomed = {row.id: Doomed(row.ref, row.expected_oid) for row in rows}
        look, part = self._asked, self._part
        try:
            outcomes = git_refs.preview(root, path, list(doomed.values()), until=look.until, grace=1.0)
        except GitTimedOut:
            return False
        except RootUnavailable:
            raise
        except GitError:
            part.keep(FAILED, len(rows))
            return True
        for row in rows:
            outcome = outcomes[doomed[row.id]]
            if outcome.state == "deleted":
                part.one(str(row.id), row.ref, row.updated_at, size=look.size, project=row.project_id)
            else:
                # Behind the colon of a reason is the ref that it is about.
                code = str(outcome.reason).partition(":")[0]
                part.keep(code if outcome.state == "rejected" else outcome.state, 1)
        return True

"""The preview of refs: a look into the repositories for refs that are deleted, missing, rejected, moved or locked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forgekeeper.api.batches import find_batch_name
from forgekeeper.api.inspection import PASSED_OVER_REASON, PreviewContext, PreviewPart
from forgekeeper.api.refs import Refs
from forgekeeper.platform.database import exclusions, queries
from forgekeeper.platform.database.queries import KeyPage
from forgekeeper.platform.database.survey import estimate_rows, rows_of_query
from forgekeeper.sources.status_queue import PendingRef, RefQueue
from forgekeeper.targets import git_refs
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_refs import RefToDelete
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.missing_repositories import RepositoriesMissing, doubt_missing, find_missing
from forgekeeper.targets.repositories_root import prove_root

PROJECTS_PER_PAGE, REFS_PER_PAGE = 100, 10_000
REPOSITORY_MISSING_REASON, REPOSITORY_FAILED_REASON, REPOSITORIES_UNSEEN_REASON = (
    "repository_missing",
    "repository_failed",
    "repositories_unseen",
)
"""Reasons why a run would keep rows."""


def preview_refs(refs: Refs[Any], look: PreviewContext) -> Iterator[PreviewPart]:
    """Count the refs that a run would delete, and the rows that it would close without a repository."""
    part = look.begin_part(refs.record)
    closed = look.begin_part(refs.record_without_repository, verb="closed without a repository")
    batch, bad = find_batch_name(look.batch), look.passed_over(part.record)
    queue = RefQueue(refs, batch)
    pending = rows_of_query(queue.select_not_excluded(), refs.source.updated_at)
    part.add_kept(exclusions.EXCLUDED_REASON, queries.count_bounded(queue.select_excluded()))
    try:
        if not _RefPreview(queue, look, bad, part, closed).preview_repositories(prove_root(look.settings)):
            part.set_estimate(estimate_rows(pending, bad))
        part.add_kept(PASSED_OVER_REASON, pending.count_among(bad))
    except RootUnavailable:
        part.kept[REPOSITORIES_UNSEEN_REASON] = None
        look.count_rows(part, pending)
        part.estimate = True
    yield part
    yield closed


class _RefPreview:
    """One preview: *part* counts the refs, *closed* the rows that are closed without a repository."""

    def __init__(
        self, queue: RefQueue, look: PreviewContext, bad: Collection[int], part: PreviewPart, closed: PreviewPart
    ) -> None:
        self._queue, self._look, self._bad, self._part, self._closed = queue, look, bad, part, closed

    def preview_repositories(self, root: Path) -> bool:
        """Look into one repository after another; return False if the time was up first."""
        paths, missing, after = dict[int, str | None](), dict[int, str](), 0
        while projects := self._queue.find_waiting_projects(after=after, limit=PROJECTS_PER_PAGE):
            if self._look.is_over():
                return False
            found = self._queue.read_paths(projects)
            paths |= dict.fromkeys(projects) | found
            missing |= find_missing(root, found)
            after = projects[-1]
        closed = {project for project, path in paths.items() if path is None}
        closed |= missing.keys() if self._can_trust_missing(root, missing, len(paths)) else set()
        return all(self._preview_repository(root, project, path, closed, missing) for project, path in paths.items())

    def _can_trust_missing(self, root: Path, missing: dict[int, str], projects: int) -> bool:
        """Return whether a run would believe that the repositories are deleted."""
        with suppress(RepositoriesMissing):
            share = self._look.settings.missing_repositories
            doubt_missing(root, missing, projects=projects, share=share, batch=self._look.batch)
            return True
        return False

    def _preview_repository(
        self, root: Path, project: int, path: str | None, closed: Collection[int], missing: Collection[int]
    ) -> bool:
        """Count the rows of a project page by page; return False if the time was up first."""
        after, look = 0, self._look
        while page := self._queue.read_page(project, KeyPage(REFS_PER_PAGE, after, without=self._bad)):
            if look.is_over():
                return False
            after, rows = page[-1].id, self._queue.drop_excluded(page)
            if path is None or project in closed:
                for row in rows:
                    self._closed.add_record(
                        str(row.id), row.ref, row.updated_at, size=look.sample_size, project=project
                    )
            elif project in missing:
                self._part.add_kept(REPOSITORY_MISSING_REASON, len(rows))
            elif rows and not self._preview_page(root, path, rows):
                return False
            look.on_progress(self._part)
        return True

    def _preview_page(self, root: Path, path: str, rows: Sequence[PendingRef]) -> bool:
        """Count a page's rows by git's expected results; return False if the time was up first."""
        doomed = {row.id: RefToDelete(row.ref, row.expected_oid) for row in rows}
        look, part = self._look, self._part
        try:
            outcomes = git_refs.preview_deletion(root, path, list(doomed.values()), until=look.until, grace=1.0)
        except GitTimedOut:
            return False
        except RootUnavailable:
            raise
        except GitError:
            part.add_kept(REPOSITORY_FAILED_REASON, len(rows))
            return True
        for row in rows:
            outcome = outcomes[doomed[row.id]]
            if outcome.state == "deleted":
                part.add_record(str(row.id), row.ref, row.updated_at, size=look.sample_size, project=row.project_id)
            else:
                # Behind the colon of a reason is the ref that it is about.
                code = str(outcome.reason).partition(":")[0]
                part.add_kept(code if outcome.state == "rejected" else outcome.state, 1)
        return True

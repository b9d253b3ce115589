"""What the children of batch 58 would delete: a look into the repositories that changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forgekeeper.database.survey import Selected, expected
from forgekeeper.declaring.items import Page
from forgekeeper.declaring.preview import PASSED_OVER, Look, Part
from forgekeeper.storage import git_refs
from forgekeeper.storage.git_command import GitError, GitTimedOut
from forgekeeper.storage.git_refs import Doomed
from forgekeeper.storage.git_repository import RepositoriesMissing, RootUnavailable
from models import GitRefDeletion
from workers.git_ref_cleanup.deletions import Pending, pending_of, waiting_projects
from workers.git_ref_cleanup.repositories import believe, missing_of, paths, require_root

PROJECTS, REFS = 100, 10_000
MISSING, FAILED, UNSEEN = "repository_missing", "repository_failed", "repositories_unseen"


def projects(look: Look) -> Iterator[Part]:
    """Count the projects that have pending rows: each gets a child."""
    part = look.part("project", verb="looked after by a child each")
    for found in _pages():
        where = paths(found)
        for number in found:
            part.one(str(number), where.get(number), None, size=look.size)
        look.told(part)
        if look.over():
            part.guess(part.records)
            break
    yield part


def refs(look: Look) -> Iterator[Part]:
    """Look into the repositories for what would be deleted, and what is gone, refused, moved or locked."""
    seen = Seen(look)
    try:
        seen.look_into_all(require_root(look.settings))
    except RootUnavailable:
        seen.refs.kept[UNSEEN] = None
        look.count(seen.refs, seen.pending)
        seen.refs.estimate = True
    yield seen.refs
    yield seen.gone


class Seen:
    """What a look has found: *refs* that would be deleted, and rows that would be closed as they are *gone*."""

    def __init__(self, look: Look) -> None:
        self.refs = look.part("git_ref_deletion")
        self.gone = look.part("gone_ref_deletion", verb="closed, as there is no repository")
        self.pending = Selected(GitRefDeletion.pending(), GitRefDeletion.updated_at)
        self._look = look
        self._bad = look.passed_over("git_ref_deletion")
        self._rows = 0
        self._missing: dict[int, str] = {}
        self._of_missing: Counter[int] = Counter()

    def look_into_all(self, root: Path) -> None:
        """Look into one repository after another, until none is left or the time is up."""
        self.refs.keep(PASSED_OVER, self.pending.among(self._bad))
        total = 0
        for found in _pages():
            self._missing |= missing_of(root, found)
            where, total = paths(found), total + len(found)
            for number in found:
                if not self._look_into(root, number, where.get(number)):
                    self._cut_off()
                    return
        self._judge_missing(root, total)

    def _look_into(self, root: Path, project: int, path: str | None) -> bool:
        """Look into one; return False where the time was up first."""
        after = 0
        while rows := pending_of(project, Page(REFS, after, without=self._bad)):
            if self._look.over():
                return False
            if path is None or project in self._missing:
                self._of_missing[project] += len(rows)
                for row in rows:
                    self.gone.one(str(row.id), row.ref, row.updated_at, size=self._look.size, project=project)
            elif not self._look_at(root, path, rows):
                return False
            after = rows[-1].id
            self._rows += len(rows)
            self._look.told(self.refs)
        return True

    def _look_at(self, root: Path, path: str, rows: list[Pending]) -> bool:
        doomed = {row.id: Doomed(row.ref, row.expected_oid) for row in rows}
        try:
            outcomes = git_refs.preview(root, path, list(doomed.values()), until=self._look.until, grace=1.0)
        except GitTimedOut:
            return False
        except RootUnavailable:
            raise
        except GitError:
            self.refs.keep(FAILED, len(rows))
            return True
        for row in rows:
            outcome = outcomes[doomed[row.id]]
            if outcome.state == "deleted":
                self.refs.one(str(row.id), row.ref, row.updated_at, size=self._look.size, project=row.project_id)
            else:
                # Behind the colon of a reason stands what it is about.
                code = str(outcome.reason).partition(":")[0]
                self.refs.keep(code if outcome.state == "rejected" else outcome.state, 1)
        return True

    def _judge_missing(self, root: Path, total: int) -> None:
        """Let the rows of missing repositories stay where so many are missing that a run would not believe it."""
        try:
            believe(root, self._missing, total, self._look.settings.missing_repositories)
        except RepositoriesMissing:
            stays = sum(rows for project, rows in self._of_missing.items() if project in self._missing)
            self.refs.keep(MISSING, stays)
            self.gone = self._look.part("gone_ref_deletion", verb=self.gone.verb)
            self.gone.records = self._of_missing.total() - stays

    def _cut_off(self) -> None:
        """Guess: of the rows that were not looked at as many are deleted as of those that were."""
        rows = max(self._rows, expected(self.pending, self._bad))
        for part in (self.refs, self.gone):
            part.guess(round(part.records * rows / self._rows) if self._rows else part.records)
        if not self._rows:
            self.refs.guess(rows)


def _pages() -> Iterator[list[int]]:
    after = 0
    while found := waiting_projects(after=after, limit=PROJECTS):
        yield found
        after = found[-1]

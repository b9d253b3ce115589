"""What the children of batch 58 would delete: a look into the repositories that changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from forgekeeper.database.survey import expected, selected
from forgekeeper.declaring.items import Page
from forgekeeper.declaring.shown import PASSED_OVER, Look, Part
from forgekeeper.storage import git_refs
from forgekeeper.storage.git_command import GitError, GitTimedOut
from forgekeeper.storage.git_refs import Doomed
from forgekeeper.storage.git_repository import RootUnavailable
from models import GitRefDeletion
from workers.git_ref_cleanup.deletions import Pending, pending_of, waiting_projects
from workers.git_ref_cleanup.repositories import RepositoriesMissing, believe, missing_of, paths, require_root

PROJECTS, REFS = 100, 10_000
MISSING, FAILED, UNSEEN = "repository_missing", "repository_failed", "repositories_unseen"


def refs(look: Look) -> Iterator[Part]:
    """Look into the repositories for what would be deleted, and what is gone, refused, moved or locked."""
    part, gone = look.part("git_ref_deletion"), look.part("gone_ref_deletion", verb="closed, as there is no repository")
    bad, pending = look.passed_over(part.record), selected(GitRefDeletion.pending(), GitRefDeletion.updated_at)
    try:
        if not _look_into_all(require_root(look.settings), look, bad, part, gone):
            part.guess(expected(pending, bad))
        part.keep(PASSED_OVER, pending.among(bad))
    except RootUnavailable:
        part.kept[UNSEEN] = None
        look.count(part, pending)
        part.estimate = True
    yield part
    yield gone


def _look_into_all(root: Path, look: Look, bad: Collection[int], part: Part, gone: Part) -> bool:
    """Look into one repository after another; return False where the time was up first."""
    where, missing = dict[int, str | None](), dict[int, str]()
    for found in _pages():
        if look.over():
            return False
        where |= dict.fromkeys(found) | paths(found)
        missing |= missing_of(root, found)
    believed = False
    with suppress(RepositoriesMissing):
        believe(root, missing, len(where), look.settings.missing_repositories)
        believed = True
    for project, path in where.items():
        after = 0
        while rows := pending_of(project, Page(REFS, after, without=bad)):
            if look.over():
                return False
            if path is None or (believed and project in missing):
                for row in rows:
                    gone.one(str(row.id), row.ref, row.updated_at, size=look.size, project=project)
            elif project in missing:
                part.keep(MISSING, len(rows))
            elif not _look_at(root, path, rows, look, part):
                return False
            after = rows[-1].id
            look.told(part)
    return True


def _look_at(root: Path, path: str, rows: Sequence[Pending], look: Look, part: Part) -> bool:
    doomed = {row.id: Doomed(row.ref, row.expected_oid) for row in rows}
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
            # Behind the colon of a reason stands what it is about.
            code = str(outcome.reason).partition(":")[0]
            part.keep(code if outcome.state == "rejected" else outcome.state, 1)
    return True


def _pages() -> Iterator[list[int]]:
    after = 0
    while found := waiting_projects(after=after, limit=PROJECTS):
        yield found
        after = found[-1]

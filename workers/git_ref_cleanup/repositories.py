"""Projects' repositories as they are: where they lie, which are missing, where locks were left (batch 58).

What a preview shows is found by looking into them, too.  Nothing here changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from forgekeeper import Blocked
from forgekeeper.api.batches import batch_of
from forgekeeper.api.items import Page
from forgekeeper.api.shown import PASSED_OVER, Look, Part
from forgekeeper.platform.database import exclusions, now, queries
from forgekeeper.platform.database.survey import expected, selected
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import git_refs, sentinel
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_refs import Doomed
from forgekeeper.targets.git_repository import (
    RepositoryFailed,
    RepositoryMissing,
    RootUnavailable,
    open_repository,
    served,
)
from metrics.catalogue import Gauge, Reading
from models import GitRefDeletion, Project
from workers.git_ref_cleanup.deletions import Pending, due, excluded, not_excluded, pending_of, waiting_projects

FEW = 3
"""Fewer repositories than so many may be gone whatever share of all they are."""
LOOKED_AT = 200
"""How many repositories are looked at for stale locks: of those with pending deletions, the first."""
STALE_LOCK = timedelta(minutes=20)
"""A lock this old was left behind by a killed git, and no ref can be deleted: a deletion ends after ten minutes."""
STALE_LOCKS = Gauge(
    "git_stale_locks",
    "Repositories with pending ref deletions whose packed-refs.lock is older than any deletion may last.",
)
PROJECTS, REFS = 100, 10_000
"""A page of projects, and one of their refs, in a preview."""
MISSING, FAILED, UNSEEN = "repository_missing", "repository_failed", "repositories_unseen"


class RepositoriesMissing(GitError):
    """So many repositories are missing that they are not believed to be gone; the message says what to do."""


def require_plain(settings: Settings) -> None:
    """Raise `Blocked` where there is no root of repositories, or a Git server keeps it."""
    root = settings.repositories_root
    if root is None:
        raise Blocked("no_repositories", "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT")
    if settings.git_server == "refuse" and (said := served(root)):
        raise Blocked("git_server", said)


def require_root(settings: Settings) -> Path:
    """Return the repositories' root; raise `RootUnavailable` unless it is this installation's, and can be read."""
    root = settings.repositories_root
    if root is None:
        raise RootUnavailable("FORGEKEEPER_REPOSITORIES_ROOT is not set")
    try:
        found = sentinel.Folder(root).sentinel()
    except sentinel.Unreadable as error:
        raise RootUnavailable(str(error)) from None
    if found is None:
        raise RootUnavailable(f"{root} has no {sentinel.NAME}; `forgekeeper check` says what to do")
    if said := sentinel.objection(root, found, Installation.ensure()):
        raise RootUnavailable(said)
    return root


def paths(projects: Sequence[int]) -> dict[int, str]:
    """Return where the repositories of those of *projects* lie that there are, below the root."""
    return {project.id: project.disk_path for project in Project.select().where(Project.id.in_(list(projects)))}


def missing_of(root: Path, projects: Sequence[int]) -> dict[int, str]:
    """Return those of *projects* that lack their repositories, with their paths; that of no project is not missed."""
    return {number: path for number, path in paths(projects).items() if _is_missing(root, path)}


def _is_missing(root: Path, disk_path: str) -> bool:
    """Return whether nothing is at *disk_path*; what cannot be looked at is for a child to judge."""
    with suppress(OSError, ValueError):
        (root / disk_path).stat()  # most are there, and need no more than that
        return False
    with suppress(RepositoryFailed):
        try:
            open_repository(root, disk_path)
        except RepositoryMissing:
            return True
    return False


def believe(root: Path, missing: Mapping[int, str], projects: int, share: float) -> None:
    """Raise `RepositoriesMissing` unless those *missing* of so many *projects* may be gone."""
    for project_id, path in missing.items():
        other = path.removesuffix(".git") if path.endswith(".git") else f"{path}.git"
        if os.path.lexists(root / other):
            raise RepositoriesMissing(
                f"project {project_id} has no repository at {path}, but there is one at {other}: no row of a missing"
                " repository was closed; correct disk_path"
            )
    if len(missing) >= FEW and len(missing) > share * projects:
        raise RepositoriesMissing(
            f"{len(missing)} of {projects} projects have no repository below {root}, {min(missing)} the first of them:"
            " no row of theirs was closed; is a disk not mounted, or the root another? Where they are gone indeed,"
            " FORGEKEEPER_MISSING_REPOSITORIES=1 lets `forgekeeper run git_ref_cleanup` close them"
        )


def stale_locks(settings: Settings) -> Iterator[Reading]:
    """Count stale locks; where the root cannot be read nothing is said of them."""
    root, left = settings.repositories_root, now() - STALE_LOCK
    waiting = paths(waiting_projects(after=0, limit=LOOKED_AT)).values() if root else ()
    with suppress(RootUnavailable):
        yield Reading("git_stale_locks", sum(_has_lock_of(root, disk_path, left) for disk_path in waiting if root))


def _has_lock_of(root: Path, disk_path: str, left: datetime) -> bool:
    # Not by the clock of its file system, as `age` says: the exporter may write no file there to learn it.
    with suppress(RepositoryMissing, RepositoryFailed, OSError):
        lock = open_repository(root, disk_path).git_dir / "packed-refs.lock"
        return lock.lstat().st_mtime < left.timestamp()
    return False


def previewed(look: Look) -> Iterator[Part]:
    """Look into the repositories for what would be deleted, and what is gone, refused, moved or locked."""
    part, gone = look.part("git_ref_deletion"), look.part("gone_ref_deletion", verb="closed, as there is no repository")
    batch, bad = batch_of(look.batch), look.passed_over(part.record)
    pending = selected(due(batch), GitRefDeletion.updated_at)
    part.keep(exclusions.REASON, queries.count(excluded(batch)))
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
    where, missing, after, believed = dict[int, str | None](), dict[int, str](), 0, False
    while found := waiting_projects(after=after, limit=PROJECTS):
        if look.over():
            return False
        where |= dict.fromkeys(found) | paths(found)
        missing |= missing_of(root, found)
        after = found[-1]
    with suppress(RepositoriesMissing):
        believe(root, missing, len(where), look.settings.missing_repositories)
        believed = True
    for project, path in where.items():
        after = 0
        while page := pending_of(project, Page(REFS, after, without=bad)):
            if look.over():
                return False
            after, rows = page[-1].id, not_excluded(batch_of(look.batch), page)
            if path is None or (believed and project in missing):
                for row in rows:
                    gone.one(str(row.id), row.ref, row.updated_at, size=look.size, project=project)
            elif project in missing:
                part.keep(MISSING, len(rows))
            elif rows and not _look_at(root, path, rows, look, part):
                return False
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

"""Where projects' repositories lie, whether those that are missing may be gone, and locks left in them (batch 58)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from forgekeeper.installation import Installation
from forgekeeper.settings import Settings
from forgekeeper.storage import sentinel
from forgekeeper.storage.git_command import GitError
from forgekeeper.storage.git_repository import RepositoryFailed, RepositoryMissing, RootUnavailable, open_repository
from metrics.catalogue import Gauge, Reading
from models import Project
from workers.git_ref_cleanup.deletions import waiting_projects

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


class RepositoriesMissing(GitError):
    """So many repositories are missing that they are not believed to be gone; the message says what to do."""


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
    try:
        open_repository(root, disk_path)
    except RepositoryMissing:
        return True
    except RepositoryFailed:
        pass
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
    root = settings.repositories_root
    waiting = paths(waiting_projects(after=0, limit=LOOKED_AT)).values() if root else ()
    with suppress(RootUnavailable):
        yield Reading("git_stale_locks", sum(_has_stale_lock(root, disk_path) for disk_path in waiting if root))


def _has_stale_lock(root: Path, disk_path: str) -> bool:
    with suppress(RepositoryMissing, RepositoryFailed):
        age = open_repository(root, disk_path).age("packed-refs.lock")
        return age is not None and age > STALE_LOCK
    return False

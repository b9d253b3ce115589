"""Where projects' repositories lie, whether those that are missing may be gone, and locks left in them (batch 58)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from forgekeeper.database.installation import Installation
from forgekeeper.settings import Settings
from forgekeeper.storage import git_repository, sentinel
from forgekeeper.storage.git_command import GitError
from forgekeeper.storage.git_repository import RepositoriesMissing, RootUnavailable
from metrics.catalogue import Gauge, Reading
from models import Project
from workers.git_ref_cleanup.deletions import waiting_projects

LOOKED_AT = 200
"""How many repositories are looked at for stale locks: of those with pending deletions, the first."""
STALE_LOCK = timedelta(minutes=20)
"""A lock this old was left behind by a killed git, and no ref can be deleted: a deletion ends after ten minutes."""
STALE_LOCKS = Gauge(
    "git_stale_locks",
    "Repositories with pending ref deletions whose packed-refs.lock is older than any deletion may last.",
)


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
    return {number: path for number, path in paths(projects).items() if git_repository.is_missing(root, path)}


def believe(root: Path, missing: Mapping[int, str], projects: int, share: float) -> None:
    """Raise `RepositoriesMissing` unless those *missing* of so many *projects* may be gone."""
    for project_id, path in missing.items():
        if other := git_repository.misnamed(root, path):
            raise RepositoriesMissing(
                f"project {project_id} has no repository at {path}, but there is one at {other}: no row of a missing"
                " repository was closed; correct disk_path"
            )
    if git_repository.too_many_missing(len(missing), projects, share):
        raise RepositoriesMissing(
            f"{len(missing)} of {projects} projects have no repository below {root}, {min(missing)} the first of them:"
            " no row of theirs was closed; is a disk not mounted, or the root another? Where they are gone indeed,"
            " FORGEKEEPER_MISSING_REPOSITORIES=1 lets `forgekeeper run git_ref_cleanup` close them"
        )


def stale_locks(settings: Settings) -> Iterator[Reading]:
    """Count stale locks; where the root cannot be read nothing is said of them."""
    root = settings.repositories_root
    waiting = paths(waiting_projects(after=0, limit=LOOKED_AT)).values() if root else ()
    try:
        stale = sum(_has_stale_lock(root, disk_path) for disk_path in waiting if root)
    except RootUnavailable:
        return
    yield Reading("git_stale_locks", stale)


def _has_stale_lock(root: Path, disk_path: str) -> bool:
    try:
        age = git_repository.open_repository(root, disk_path).age("packed-refs.lock")
    except RootUnavailable:
        raise
    except GitError:
        return False
    return age is not None and age > STALE_LOCK

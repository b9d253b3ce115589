"""Locks that a killed git has left in repositories: while one is there, no ref can be deleted (batch 58)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from forgekeeper.settings import Settings
from forgekeeper.storage import git_repository
from metrics.catalogue.metric import Gauge, Reading
from workers.git_ref_cleanup.deletions import waiting_projects
from workers.git_ref_cleanup.repositories import paths

LOOKED_AT = 200
"""How many repositories are looked at: of those with pending deletions, the first."""
STALE_LOCK = timedelta(minutes=20)
"""A lock this old was left behind: a deletion ends after ten minutes."""
PACKED_REFS = "packed-refs.lock"

GAUGE = Gauge(
    "git_stale_locks",
    "Repositories with pending ref deletions whose packed-refs.lock is older than any deletion may last.",
)


def readings(settings: Settings) -> Iterator[Reading]:
    """Count stale locks; where the root cannot be read nothing is said of them."""
    if settings.repositories_root is None:
        yield Reading("git_stale_locks", 0)
        return
    waiting = paths(waiting_projects(after=0, limit=LOOKED_AT)).values()
    try:
        stale = sum(_is_stale(settings.repositories_root, disk_path) for disk_path in waiting)
    except git_repository.RootUnavailable:
        return
    yield Reading("git_stale_locks", stale)


def _is_stale(root: Path, disk_path: str) -> bool:
    try:
        repository = git_repository.open_repository(root, disk_path)
    except (git_repository.RepositoryMissing, git_repository.RepositoryFailed):
        return False
    if not (repository.git_dir / PACKED_REFS).exists():
        return False
    return (repository.age(PACKED_REFS) or timedelta()) > STALE_LOCK

"""Missing repositories: which are missing, and whether so few are that they are believed to be deleted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from forgekeeper.targets.git_command import GitError
from forgekeeper.targets.git_repository import RepositoryFailed, RepositoryMissing, open_repository

MIN_DOUBTED_REPOSITORIES = 3
"""Fewer missing repositories are believed to be deleted, whatever share of all they are."""


class RepositoriesMissing(GitError):
    """Too many repositories are missing to believe that they are deleted; the message says how to continue."""


def find_missing(root: Path, paths: Mapping[int, str]) -> dict[int, str]:
    """Return the projects without a repository, with their paths, of projects with the *paths* of theirs."""
    return {project: path for project, path in paths.items() if _is_missing(root, path)}


def _is_missing(root: Path, disk_path: str) -> bool:
    """Return whether nothing is at *disk_path*; a repository that cannot be looked at is for a child to judge."""
    with suppress(OSError, ValueError):
        (root / disk_path).stat()  # most exist, and need no more than that
        return False
    with suppress(RepositoryFailed):
        try:
            open_repository(root, disk_path)
        except RepositoryMissing:
            return True
    return False


def doubt_missing(root: Path, missing: Mapping[int, str], *, projects: int, share: float, batch: str) -> None:
    """Raise `RepositoriesMissing` unless the repositories *missing* of so many *projects* may be deleted.

    At most *share* of the projects may lack a repository.  *batch* is named in the message.
    """
    for project, path in missing.items():
        other = path.removesuffix(".git") if path.endswith(".git") else f"{path}.git"
        if os.path.lexists(root / other):
            raise RepositoriesMissing(
                f"project {project} has no repository at {path}, but there is one at {other}: no row of a missing"
                " repository was closed; correct disk_path"
            )
    if len(missing) >= MIN_DOUBTED_REPOSITORIES and len(missing) > share * projects:
        raise RepositoriesMissing(
            f"{len(missing)} of {projects} projects have no repository below {root}, {min(missing)} the first of them:"
            " no row of theirs was closed; is a disk not mounted, or the root another? Where they are gone indeed,"
            f" FORGEKEEPER_MISSING_REPOSITORIES=1 lets `forgekeeper run {batch}` close them"
        )

"""Missing repositories: find them, and doubt their deletion if too many are missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from forgekeeper.targets.git_command import GitError
from forgekeeper.targets.git_repository import RepositoryFailed, RepositoryMissing, open_repository

MIN_DOUBTED_REPOSITORIES = 3
"""With fewer missing repositories than this, all are believed to be deleted, whatever their share."""


class RepositoriesMissing(GitError):
    """Too many repositories are missing to be deleted; the message says how to continue."""


def find_missing(root: Path, paths: Mapping[int, str]) -> dict[int, str]:
    """Return the projects of *paths* whose repositories are missing, with their paths."""
    return {project: path for project, path in paths.items() if _is_missing(root, path)}


def _is_missing(root: Path, disk_path: str) -> bool:
    """Return whether nothing is at *disk_path*; an unreadable repository is not missing.

    A child has to judge it.
    """
    with suppress(OSError, ValueError):
        (root / disk_path).stat()  # enough for most repositories, which exist
        return False
    with suppress(RepositoryFailed):
        try:
            open_repository(root, disk_path)
        except RepositoryMissing:
            return True
    return False


def doubt_missing(root: Path, missing: Mapping[int, str], *, projects: int, share: float, batch: str) -> None:
    """Raise `RepositoriesMissing` if too many repositories of the *projects* are *missing*.

    At most *share* of the projects may lack a repository, and no missing repository may exist at its path with or
    without `.git`.  *batch* is named in the message.
    """
    for project, path in missing.items():
        other = path.removesuffix(".git") if path.endswith(".git") else f"{path}.git"
        if os.path.lexists(root / other):
            raise RepositoriesMissing(
                f"project {project} has no repository at {path}, but a repository exists at {other}: correct disk_path;"
                " no row of a missing repository was closed"
            )
    if len(missing) >= MIN_DOUBTED_REPOSITORIES and len(missing) > share * projects:
        raise RepositoriesMissing(
            f"{len(missing)} of {projects} projects have no repository below {root}, such as project {min(missing)};"
            " none of their rows was closed: check that the disk is mounted and the root is right; if the repositories"
            f" were deleted on purpose, run `FORGEKEEPER_MISSING_REPOSITORIES=1 forgekeeper run {batch}`"
        )

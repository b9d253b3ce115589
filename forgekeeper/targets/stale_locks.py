"""Stale locks of repositories.

A killed git leaves `packed-refs.lock` behind, and then no ref can be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from forgekeeper.targets.git_repository import RepositoryFailed, RepositoryMissing, open_repository


def count_stale_locks(root: Path, disk_paths: Iterable[str], *, before: datetime) -> int:
    """Count the repositories with a lock from *before* that instant.

    Raises `RootUnavailable` without the root.
    """
    return sum(_has_lock(root, disk_path, before) for disk_path in disk_paths)


def _has_lock(root: Path, disk_path: str, before: datetime) -> bool:
    # By our clock, unlike `read_file_age`, which writes a file: the exporter may not write.
    with suppress(RepositoryMissing, RepositoryFailed, OSError):
        lock = open_repository(root, disk_path).git_dir / "packed-refs.lock"
        return lock.lstat().st_mtime < before.timestamp()
    return False

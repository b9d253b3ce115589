"""The root of all repositories: prove that its disk is mounted and the right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import sentinel
from forgekeeper.targets.git_repository import RootUnavailable


def prove_root(settings: Settings, find_installation: Callable[[], str] = Installation.ensure_id) -> Path:
    """Return the repositories' root.

    Raises `RootUnavailable` unless it can be read and belongs to the installation that *find_installation* returns.
    """
    root = settings.repositories_root
    if root is None:
        raise RootUnavailable("FORGEKEEPER_REPOSITORIES_ROOT is not set")
    try:
        found = sentinel.Folder(root).read_owner()
    except sentinel.PlaceUnreadable as error:
        raise RootUnavailable(str(error)) from None
    if found is None:
        raise RootUnavailable(f"{root} has no {sentinel.SENTINEL_NAME}; `forgekeeper check` says what to do")
    if objection := sentinel.why_not_ours(root, found, find_installation()):
        raise RootUnavailable(objection)
    return root

"""Preconditions of batches that delete refs: a root of repositories, and no Git server."""

from __future__ import annotations

from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.settings import Settings
from forgekeeper.targets.git_repository import why_left_to_git_server


def require_repositories(settings: Settings) -> None:
    """Raise `Blocked` if there is no root of repositories, or if a Git server keeps it."""
    root = settings.repositories_root
    if root is None:
        raise Blocked("no_repositories", "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT")
    if settings.git_server == "refuse" and (objection := why_left_to_git_server(root)):
        raise Blocked("git_server", objection)

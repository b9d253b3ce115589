"""Bare repositories, made by git itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from forgekeeper.storage.git_command import Git, legible

TIMEOUT = 60.0
HISTORY = b"""\
commit refs/heads/main
committer Sample <sample@example.org> 1700000000 +0000
data 6
sample
"""


def create(root: Path, disk_path: str, refs: Sequence[str]) -> None:
    """Make a bare repository with the branch main and *refs*, all at one commit."""
    path = root / disk_path
    path.parent.mkdir(parents=True, exist_ok=True)
    branches = b"".join(b"reset %s\nfrom refs/heads/main\n" % ref.encode() for ref in refs)
    _git(path, "init", "--quiet", "--bare", "--template=", "--initial-branch=main")
    _git(path, "fast-import", "--quiet", given=HISTORY + branches)
    _git(path, "pack-refs", "--all")


def count_refs(root: Path) -> int:
    """Count the refs of all repositories below *root*."""
    return sum(len(refs(head.parent)) for head in root.rglob("HEAD"))


def refs(path: Path) -> set[str]:
    """Return the refs of the repository at *path*, none where there is none."""
    return set(_git(path, "for-each-ref", "--format=%(refname)").splitlines()) if path.exists() else set()


def _git(path: Path, *arguments: str, given: bytes = b"") -> str:
    answer = Git(path, until=time.monotonic() + TIMEOUT, grace=1.0).run(*arguments, given=given)
    if answer.code != 0:
        raise OSError(f"git {arguments[0]}: {legible(answer.complaint())}")
    return answer.out.decode()

"""Sample repositories for `forgekeeper seed`: bare ones, made by git itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from forgekeeper.storage.git_command import Git

PATIENCE = timedelta(minutes=1)
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
    for arguments, given in (
        (["init", "--quiet", "--bare", "--template=", "--initial-branch=main"], b""),
        (["fast-import", "--quiet"], HISTORY + branches),
        (["pack-refs", "--all"], b""),
    ):
        with _git(path).run(*arguments, given=given) as answer:
            if answer.code != 0:
                raise OSError(f"git {arguments[0]}: {answer.complaint().decode(errors='replace')}")


def count(root: Path) -> int:
    """Count the refs of all repositories below *root*."""
    return sum(len(refs(head.parent)) for head in root.rglob("HEAD"))


def refs(path: Path) -> set[str]:
    """Return the refs of the repository at *path*, none where there is none."""
    if not path.exists():
        return set()
    with _git(path).run("for-each-ref", "--format=%(refname)") as answer:
        return {line.decode().rstrip("\n") for line in answer.out.readlines()}


def _git(path: Path) -> Git:
    return Git(path, time.monotonic() + PATIENCE.total_seconds(), grace=1.0)

"""Restore refs where they were: only those that are not there, and only while git has their objects.

All go in one transaction; where git refuses it, each is tried by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forgekeeper.storage.git_command import Git, legible, understand
from forgekeeper.storage.git_repository import Repository, RepositoryFailed, open_repository
from forgekeeper.storage.git_values import refusal, standing_in

BRANCHES = "refs/heads/"

_OID = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")
_LINK = re.compile(r"ref: (?P<target>\S+)\Z")


@dataclass(frozen=True)
class Restored:
    """What became of one ref; unless it was restored, or would be, *reason* says why in a sentence."""

    state: Literal["restored", "would be restored", "exists", "pruned", "symbolic", "refused"]
    reason: str = ""
    command: tuple[str, ...] = ()
    """What a person can run in the repository to restore it."""


RESTORED = Restored("restored")
POSSIBLE = Restored("would be restored")
PRUNED = Restored("pruned", "git has removed its object: it cannot be restored from here")
UNKNOWN = Restored("refused", "what it was at was not recorded")


def restore(
    root: Path,
    disk_path: str,
    wanted: Mapping[str, str],
    *,
    until: float,
    dry_run: bool = False,
    before: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> dict[str, Restored]:
    """Restore the refs of the repository at *disk_path*, each at what it was; return what became of each.

    A ref that exists stays as it is, whatever it is at.  A symbolic ref is not restored: its command is returned.
    In a *dry_run* nothing is restored.  Git is ended at *until*, an instant of the monotonic clock.
    *before* is called with what git is about to be asked for; what it raises keeps git from being asked.
    Where we are root, git runs as the repository's owner, so that the owner can read what it writes.

    Raises `GitError`.
    """
    repository = open_repository(root, disk_path)
    found = repository.git_dir.stat()
    git = Git(repository.git_dir, until, 5.0, None if os.geteuid() else (found.st_uid, found.st_gid))
    outcomes = {ref: said for ref, was in wanted.items() if (said := _objection(ref, was))}
    outcomes |= _obstacles(repository, git, {ref: was for ref, was in wanted.items() if ref not in outcomes})
    left = {ref: was for ref, was in wanted.items() if ref not in outcomes}
    if dry_run:
        outcomes |= dict.fromkeys(left, POSSIBLE)
    elif left:
        before(left)
        outcomes |= _create_all(repository, git, left)
    return {ref: outcomes[ref] for ref in wanted}


def _objection(ref: str, was: str) -> Restored | None:
    """Return what speaks against restoring the ref before git is asked."""
    if reason := refusal(ref):
        return Restored("refused", reason)
    if link := _LINK.match(was):
        command = ("git", "symbolic-ref", ref, link["target"])
        return Restored("symbolic", "it was a symbolic ref; in its repository, this command makes it again", command)
    return None if _OID.match(was) else UNKNOWN


def _obstacles(repository: Repository, git: Git, refs: Mapping[str, str]) -> dict[str, Restored]:
    """Return those that exist, whose objects are gone, or that must not be at such an object."""
    repository.enclose(ref.encode() for ref in refs)
    there, kinds = standing_in(repository, git, refs), _kinds(repository, git, refs)
    outcomes = {}
    for ref, was in refs.items():
        if ref in there:
            outcomes[ref] = _exists(there[ref])
        elif kinds[was].endswith("missing"):
            outcomes[ref] = PRUNED
        elif ref.startswith(BRANCHES) and kinds[was] != "commit":
            outcomes[ref] = Restored("refused", f"a branch cannot be a {kinds[was]}")
    return outcomes


def _kinds(repository: Repository, git: Git, refs: Mapping[str, str]) -> dict[str, str]:
    """Return of which kind each object is, or that it is missing."""
    oids = sorted(set(refs.values()))
    answer = git.run("cat-file", "--batch-check=%(objecttype)", given="".join(f"{oid}\n" for oid in oids).encode())
    if answer.code != 0:
        raise _failure(repository, answer.complaint())
    return dict(zip(oids, answer.out.decode(errors="replace").splitlines(), strict=True))


def _create_all(repository: Repository, git: Git, refs: Mapping[str, str]) -> dict[str, Restored]:
    said = _create(repository, git, refs)
    if not said:
        return dict.fromkeys(refs, RESTORED)
    if understand(said, repository.git_dir).general:
        raise _failure(repository, said)
    outcomes = {}
    for ref, was in refs.items():
        said = _create(repository, git, {ref: was})
        outcomes[ref] = Restored("refused", legible(said)) if said else RESTORED
        if b"already exists" in said:
            outcomes[ref] = _exists("")
    return outcomes


def _create(repository: Repository, git: Git, refs: Mapping[str, str]) -> bytes:
    """Create all or nothing; return what git has against it."""
    repository.enclose(ref.encode() for ref in refs)
    commands = [f"create {ref}\0{was}" for ref, was in sorted(refs.items())]
    given = "\0".join(["start", *commands, "prepare", "commit", ""]).encode()
    answer = git.run("update-ref", "--stdin", "-z", "--no-deref", given=given)
    if answer.code < 0:
        raise _failure(repository, answer.complaint())
    repository.confirm()
    return b"" if answer.committed else answer.complaint()


def _failure(repository: Repository, complaint: bytes) -> RepositoryFailed:
    repository.confirm()
    return RepositoryFailed(f"nothing was restored: {legible(complaint)}")


def _exists(value: str) -> Restored:
    return Restored("exists", "it is there again" + (f", at {value}" if value else ""))

"""Restore deleted refs: only missing refs, and only while git has their objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forgekeeper.targets.git_command import Git, legible, understand
from forgekeeper.targets.git_repository import Repository, RepositoryFailed, look, open_repository, refusal

_OID = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")
_LINK = re.compile(r"ref: (?P<target>\S+)\Z")


@dataclass(frozen=True)
class Restored:
    """The outcome of one ref; *reason* is a sentence unless it was or would be restored."""

    state: Literal["restored", "would be restored", "exists", "pruned", "symbolic", "refused"]
    reason: str = ""
    command: tuple[str, ...] = ()
    """A command that restores the ref, for a person in the repository."""


RESTORED = Restored("restored")
POSSIBLE = Restored("would be restored")
EXISTS = Restored("exists", "it is there again")
PRUNED = Restored("pruned", "git has removed its object: it cannot be restored from here")
UNKNOWN = Restored("refused", "what it was at was not recorded")
BECAUSE = {b"reference already exists": EXISTS, b"with nonexistent object": PRUNED}
"""Outcomes by git's objections."""


def restore(
    root: Path,
    disk_path: str,
    wanted: Mapping[str, str],
    *,
    until: float,
    dry_run: bool = False,
    before: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> dict[str, Restored]:
    """Restore refs of a repository, each at its last value; return the outcomes.

    A ref that exists stays as it is.  A symbolic ref is not restored: its command is returned.
    In a *dry_run* git only reads.  Git is ended at *until*, an instant of the monotonic clock.
    *before* is called with the refs that git is about to restore; if it raises, git is not asked.

    Raises `GitError`, also if the forge could not read git's files.
    """
    repository = open_repository(root, disk_path)
    git = Git(repository.git_dir, until) if dry_run else repository.writer(until)
    outcomes = {ref: _objection(repository, ref, was) for ref, was in wanted.items()}
    left = {ref: was for ref, was in wanted.items() if outcomes[ref] is None}
    if left and not dry_run:
        before(left)
    foreseen = _foresee(repository, git, left) if dry_run and left else {}
    return {
        ref: said or foreseen.get(ref) or _create(repository, git, ref, wanted[ref]) for ref, said in outcomes.items()
    }


def _objection(repository: Repository, ref: str, was: str) -> Restored | None:
    """Return an objection to restoring the ref that is known before git is asked."""
    if reason := refusal(ref):
        return Restored("refused", reason)
    repository.enclose([ref.encode()])
    try:
        # Git would write over a symbolic ref that leads nowhere.
        if repository.has_file(ref.encode()):
            return EXISTS
    except OSError as error:
        return Restored("refused", f"it cannot be looked at: {error.strerror}")
    if link := _LINK.match(was):
        command = ("git", "symbolic-ref", ref, link["target"])
        return Restored("symbolic", "it was a symbolic ref; in its repository, this command makes it again", command)
    return None if _OID.match(was) else UNKNOWN


def _foresee(repository: Repository, git: Git, wanted: Mapping[str, str]) -> dict[str, Restored]:
    """Return the expected outcomes of refs.

    A try of git's would lock each ref for a moment and leave empty folders.
    """
    there = look(git, repository, [ref.encode() for ref in wanted]).oids
    # Git answers "OID missing" for a missing object.
    asked = "".join(f"{was}\n" for was in wanted.values()).encode()
    answer = git.run("cat-file", "--batch-check=%(objectname)", given=asked)
    kept = {line.decode() for line in answer.out.splitlines() if b" " not in line}
    return {
        ref: EXISTS if ref.encode() in there else POSSIBLE if was in kept else PRUNED for ref, was in wanted.items()
    }


def _create(repository: Repository, git: Git, ref: str, was: str) -> Restored:
    repository.enclose([ref.encode()])
    answer = git.update_refs([f"create {ref}\0{was}".encode()], confirm=lambda: True)
    repository.confirm()
    if answer.committed:
        return RESTORED
    said = answer.complaint()
    if answer.code < 0 or understand(said, repository.git_dir).general:
        raise RepositoryFailed(f"not all could be restored: {legible(said)}")
    return next((became for text, became in BECAUSE.items() if text in said), Restored("refused", legible(said)))

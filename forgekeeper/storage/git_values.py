"""What refs are at, as git and the repository's files say."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forgekeeper.storage.git_command import Git, legible
from forgekeeper.storage.git_repository import Repository, RepositoryFailed, open_repository
from forgekeeper.storage.ref_names import refusal

PATTERNS = 200
"""Names in one look: git compares each ref that it finds with every one, and they fit on a command line."""

OID_LENGTHS = {b"sha1": 40, b"sha256": 64}

_BROKEN = re.compile(rb"warning: ignoring (?:broken ref|ref with broken name) (.+)\n")


@dataclass
class Values:
    """The oids of the refs that exist, where the symbolic ones of them lead, and those that are broken."""

    oids: dict[bytes, bytes] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)
    broken: set[bytes] = field(default_factory=set)

    def shown(self, name: bytes, repository: Repository) -> str:
        """Return what the ref is at: an oid, `ref: NAME` of a symbolic one, "" where nothing can say it."""
        if name in self.links:
            return _text(b"ref: " + self.links[name])
        if name in self.oids:
            return _text(self.oids[name])
        # No listing of git's shows a symbolic ref that leads nowhere.
        content = repository.loose(name)
        return _text(content) if content.startswith(b"ref: ") else ""


def look(git: Git, repository: Repository, names: list[bytes]) -> Values:
    """Look at the refs of these names.  Raises `RepositoryFailed`, or what has become of the repository."""
    values = Values()
    if len(names) > PATTERNS:
        # Each look reads all files beside those of its refs: of ten thousand in one folder half a million.
        values.oids = _loose_oids(git, repository, names)
        names = [name for name in names if name not in values.oids]
    for start in range(0, len(names), PATTERNS):
        _ask_git(git, repository, names[start : start + PATTERNS], values)
    return values


def _ask_git(git: Git, repository: Repository, names: list[bytes], values: Values) -> None:
    wanted = set(names)
    with git.run("for-each-ref", "--format=%(objectname) %(refname) %(symref)", *names) as answer:
        if answer.code != 0:
            repository.confirm()
            raise RepositoryFailed(legible(answer.complaint()))
        # Where a name is a directory all that it contains is listed, too: line by line, and forgotten.
        for line in answer.out:
            oid, name, target = line.rstrip(b"\n").split(b" ", 2)
            if name in wanted:
                values.oids[name] = oid
                if target:
                    values.links[name] = target
        values.broken.update(match[1] for match in map(_BROKEN.match, answer.err) if match)


def _loose_oids(git: Git, repository: Repository, names: list[bytes]) -> dict[bytes, bytes]:
    """Return the oids that files of loose refs say plainly; anything else in them is for git to judge."""
    with git.run("rev-parse", "--show-object-format") as answer:
        length = OID_LENGTHS.get(answer.out.read().strip())
    if length is None or repository.has_reftable():
        # A git too old to say it, one that fails, or a format that is none of these.
        return {}
    plain = re.compile(rb"(?!0+\n)([0-9a-f]{%d})\n" % length)
    found = ((name, plain.fullmatch(repository.loose(name))) for name in names)
    return {name: oid[1] for name, oid in found if oid}


def standing(
    root: Path, disk_path: str, refs: Iterable[str], *, until: float | None = None, grace: float = 5.0
) -> dict[str, str]:
    """Return those of *refs* that exist, with what they are at; "" where nothing can say it.

    Git is ended at *until*, an instant of the monotonic clock.  Raises `GitError`.
    """
    repository = open_repository(root, disk_path)
    git = Git(repository.git_dir, time.monotonic() + 60 if until is None else until, grace)
    return standing_in(repository, git, [ref for ref in refs if refusal(ref) is None])


def standing_in(repository: Repository, git: Git, refs: Iterable[str]) -> dict[str, str]:
    """Return those of *refs*, of names that git may see, that are in the repository, as `standing` does."""
    names = sorted({ref.encode() for ref in refs})
    values = look(git, repository, names)
    there = {name for name in names if name in values.oids or _has_file(repository, name)}
    # Only now is it certain that what was not there had not merely gone out of sight.
    repository.confirm()
    return {name.decode(): values.shown(name, repository) for name in there}


def _has_file(repository: Repository, name: bytes) -> bool:
    try:
        return repository.has_file(name)
    except OSError as error:
        shown = name.decode(errors="backslashreplace")
        raise RepositoryFailed(f"{shown} cannot be looked at: {error.strerror}") from None


def _text(value: bytes) -> str:
    return value.strip().replace(b"\0", b"").decode(errors="backslashreplace")

"""Which names of refs git may see, and what refs are at, as git and the repository's files say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forgekeeper.storage.git_command import Git, legible
from forgekeeper.storage.git_repository import Repository, RepositoryFailed, open_repository

LONGEST = 1_024
"""Characters of a name, the limit of the column that names come from."""
PATTERNS = 200
"""Names in one look: git compares each ref that it finds with every one, and they fit on a command line."""
OID_LENGTHS = {b"sha1": 40, b"sha256": 64}

# The rules of `git check-ref-format`, in its order: a component begins with a dot or ends with ".lock", two dots,
# what is special to a shell, a revision or a pattern, an empty component, a dot at the end.
# And halves of characters, which have no bytes.
_UNFIT = re.compile(r"/\.|\.lock(?:/|\Z)|\.\.|[\x00-\x20\x7f~^:?*\[\\]|//|/\Z|\.\Z|@\{|[\ud800-\udfff]")
_BROKEN = re.compile(rb"^warning: ignoring (?:broken ref|ref with broken name) (.+)$", re.MULTILINE)


def refusal(name: str) -> Literal["not_under_refs", "too_long", "invalid_name"] | None:
    """Return why git must not see *name*; None if it may.

    `HEAD` and its like are not under `refs/`: git would delete the file, and with it the repository.
    """
    if not name.startswith("refs/"):
        return "not_under_refs"
    if len(name) > LONGEST:
        return "too_long"
    return "invalid_name" if _UNFIT.search(name) else None


@dataclass
class Values:
    """The oids of the refs that exist, where the symbolic ones of them lead, and those that are broken."""

    oids: dict[bytes, bytes] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)
    broken: set[bytes] = field(default_factory=set)

    def shown(self, name: bytes, repository: Repository) -> str:
        """Return what the ref is at: an oid, `ref: NAME` of a symbolic one, "" where nothing can say it."""
        value = b"ref: " + self.links[name] if name in self.links else self.oids.get(name)
        if value is None:
            # No listing of git's shows a symbolic ref that leads nowhere.
            content = repository.loose(name)
            value = content if content.startswith(b"ref: ") else b""
        return value.strip().replace(b"\0", b"").decode(errors="backslashreplace")


def look(git: Git, repository: Repository, names: list[bytes]) -> Values:
    """Look at the refs of these names.  Raises `RepositoryFailed`, or what has become of the repository."""
    values = Values()
    if len(names) > PATTERNS:
        # Each look reads all files beside those of its refs: of ten thousand in one folder half a million.
        values.oids = _loose_oids(git, repository, names)
        names = [name for name in names if name not in values.oids]
    for start in range(0, len(names), PATTERNS):
        wanted = set(names[start : start + PATTERNS])
        answer = git.run("for-each-ref", "--format=%(objectname) %(refname) %(symref)", *sorted(wanted))
        if answer.code != 0:
            repository.confirm()
            raise RepositoryFailed(legible(answer.complaint()))
        # Where a name is a directory all that it contains is listed, too.
        for line in answer.out.splitlines():
            oid, name, target = line.split(b" ", 2)
            if name in wanted:
                values.oids[name] = oid
                if target:
                    values.links[name] = target
        values.broken.update(_BROKEN.findall(answer.err))
    return values


def _loose_oids(git: Git, repository: Repository, names: list[bytes]) -> dict[bytes, bytes]:
    """Return the oids that files of loose refs say plainly; anything else in them is for git to judge."""
    length = OID_LENGTHS.get(git.run("rev-parse", "--show-object-format").out.strip())
    if length is None or repository.has_reftable():
        # A git too old to say it, one that fails, or a format that is none of these.
        return {}
    plain = re.compile(rb"(?!0+\n)([0-9a-f]{%d})\n" % length)
    found = ((name, plain.fullmatch(repository.loose(name))) for name in names)
    return {name: oid[1] for name, oid in found if oid}


def standing(root: Path, disk_path: str, refs: Iterable[str], *, until: float) -> dict[str, str]:
    """Return those of *refs* that exist, with what they are at; "" where nothing can say it.

    Git is ended at *until*, an instant of the monotonic clock.  Raises `GitError`.
    """
    repository = open_repository(root, disk_path)
    names = sorted({ref.encode() for ref in refs if refusal(ref) is None})
    values = look(Git(repository.git_dir, until, grace=5.0), repository, names)
    try:
        there = {name for name in names if name in values.oids or repository.has_file(name)}
    except OSError as error:
        raise RepositoryFailed(f"a ref cannot be looked at: {error.strerror}") from None
    # Only now is it certain that what was not there had not merely gone out of sight.
    repository.confirm()
    return {name.decode(): values.shown(name, repository) for name in there}

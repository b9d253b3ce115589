"""Restore refs where they were: only those that are not there, and only while git has their objects.

All go in one transaction.  What git would refuse is looked for and left out first; what it
refuses all the same is left out too, and the rest is tried again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forgekeeper.storage.git_command import Git, legible
from forgekeeper.storage.git_complaints import understand
from forgekeeper.storage.git_repository import Repository, RepositoryFailed, open_repository
from forgekeeper.storage.git_values import standing_in
from forgekeeper.storage.ref_names import refusal

TRANSACTIONS = 64
"""So often git is asked at most; each time but the last it has refused."""
BRANCHES = "refs/heads/"

_OID = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")
_LINK = re.compile(r"ref: (?P<target>\S+)\Z")


@dataclass(frozen=True)
class Restored:
    """What became of one ref; unless it was restored, or would be, *reason* says why in a sentence."""

    state: Literal["restored", "would be restored", "exists", "pruned", "symbolic", "refused"]
    reason: str = ""
    command: tuple[str, ...] = ()
    """What makes it by hand, in its repository."""


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
    grace: float = 5.0,
    dry_run: bool = False,
    before: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> dict[str, Restored]:
    """Restore the refs of the repository at *disk_path*, each at what it was; say what became of each.

    A ref that is there is left, whatever it is at.  What was a symbolic ref is named, and not made.
    In a *dry_run* nothing is made.  Git is ended at *until*, an instant of the monotonic clock.
    *before* is called with what git is about to be asked for; what it raises keeps git from being asked.
    Where we are root, git is the repository's owner: what it writes belongs to whom the rest belongs.

    Raises what `git_refs.delete` raises.
    """
    repository = open_repository(root, disk_path)
    making = _Making(repository, Git(repository.git_dir, until, grace, _owner(repository)), dict(wanted))
    making.look()
    if dry_run:
        making.outcomes |= dict.fromkeys(making.left, POSSIBLE)
    elif making.left:
        before(making.left)
        making.run()
    return {ref: making.outcomes[ref] for ref in wanted}


def _owner(repository: Repository) -> tuple[int, int] | None:
    if os.geteuid() != 0:
        return None
    found = repository.git_dir.stat()
    return found.st_uid, found.st_gid


@dataclass
class _Making:
    """One call: the refs that are still to be made, with their oids, and what has become of the others."""

    repository: Repository
    git: Git
    left: dict[str, str]
    outcomes: dict[str, Restored] = field(default_factory=dict)

    def look(self) -> None:
        """Settle what cannot be made."""
        for ref, was in self.left.items():
            if said := _objection(ref, was):
                self.outcomes[ref] = said
        self._drop()
        self.repository.enclose(ref.encode() for ref in self.left)
        there, kinds = standing_in(self.repository, self.git, self.left), self._kinds()
        for ref, was in self.left.items():
            if ref in there:
                self.outcomes[ref] = _exists(there[ref])
            elif was not in kinds:
                self.outcomes[ref] = PRUNED
            elif ref.startswith(BRANCHES) and kinds[was] != "commit":
                self.outcomes[ref] = Restored("refused", f"a branch cannot be a {kinds[was]}")
        self._drop()

    def run(self) -> None:
        """Make what is left; raise `RepositoryFailed` where git does not say which ref it is about."""
        for _ in range(TRANSACTIONS):
            said = self._transact()
            if not said:
                self.outcomes |= dict.fromkeys(self.left, RESTORED)
                return
            self._judge(said)
            self._drop()
        raise RepositoryFailed(f"nothing was restored, git refuses too many: {legible(said)}")

    def _drop(self) -> None:
        self.left = {ref: was for ref, was in self.left.items() if ref not in self.outcomes}

    def _kinds(self) -> dict[str, str]:
        """Return what kinds of objects they were at, of those that git still has."""
        oids = sorted(set(self.left.values()))
        given = "".join(f"{oid}\n" for oid in oids).encode()
        with self.git.run("cat-file", "--batch-check=%(objecttype)", given=given) as answer:
            if answer.code != 0:
                raise self._failure(answer.complaint())
            kinds = [line.decode(errors="replace").strip() for line in answer.out]
        found = dict(zip(oids, kinds, strict=True))
        return {oid: kind for oid, kind in found.items() if not kind.endswith("missing")}

    def _transact(self) -> bytes:
        """Make all or nothing; return what git has against it."""
        if not self.left:
            return b""
        self.repository.enclose(ref.encode() for ref in self.left)
        commands = [f"create {ref}\0{was}" for ref, was in sorted(self.left.items())]
        given = "\0".join(["start", *commands, "prepare", "commit", ""]).encode()
        with self.git.run("update-ref", "--stdin", "-z", "--no-deref", given=given) as answer:
            if answer.code == 0 and answer.out.read().endswith(b"commit: ok\n"):
                self.repository.confirm()
                return b""
            if answer.code < 0:
                raise self._failure(answer.complaint())
            return answer.complaint()

    def _judge(self, said: bytes) -> None:
        complaint = understand(said, self.repository.git_dir)
        ref = complaint.ref.decode(errors="replace") if complaint.ref else None
        if complaint.general or ref not in self.left:
            raise self._failure(said)
        exists = "already exists" in complaint.text
        self.outcomes[ref] = _exists("") if exists else Restored("refused", complaint.text)

    def _failure(self, complaint: bytes) -> RepositoryFailed:
        self.repository.confirm()
        return RepositoryFailed(f"nothing was restored: {legible(complaint)}")


def _objection(ref: str, was: str) -> Restored | None:
    """Say what speaks against making the ref before git is asked."""
    if reason := refusal(ref):
        return Restored("refused", reason)
    if link := _LINK.match(was):
        by_hand = ("git", "symbolic-ref", ref, link["target"])
        return Restored("symbolic", "it was a symbolic ref; in its repository, this command makes it again", by_hand)
    return None if _OID.match(was) else UNKNOWN


def _exists(value: str) -> Restored:
    return Restored("exists", "it is there again" + (f", at {value}" if value else ""))

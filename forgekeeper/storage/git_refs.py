"""Delete refs in bulk: ten thousand in one transaction, and one that cannot go keeps no other.

Each transaction that touches packed refs rewrites their file, so all go in one.  Git refuses
a transaction as a whole.  So what it would refuse is looked for and left out first; what has
changed since then makes git refuse, is left out too, and the rest is tried again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from forgekeeper.database.writes import insist
from forgekeeper.storage.git_command import Git, GitTimedOut, GitUnavailable, legible
from forgekeeper.storage.git_complaints import understand
from forgekeeper.storage.git_repository import (
    Repository,
    RepositoryFailed,
    RepositoryLocked,
    RepositoryMissing,
    RootUnavailable,
    open_repository,
)
from forgekeeper.storage.git_values import Values, look
from forgekeeper.storage.ref_names import refusal

__all__ = [
    "Before",
    "Doomed",
    "GitTimedOut",
    "GitUnavailable",
    "Outcome",
    "RepositoryFailed",
    "RepositoryLocked",
    "RepositoryMissing",
    "RootUnavailable",
    "delete",
    "foresee",
]

TRANSACTIONS = 64
"""So often git is asked at most; each time but the last it has refused."""

# Gitaly's patience, in seconds, with the locks of others.
PACKED_REFS_PATIENCE = 10.0
REF_PATIENCE = 1.0

PACKED_REFS = b"packed-refs"

NO_VALUE = b""
"""In a transaction: delete the ref whatever it is."""

CHANGES = 10
"""So often git may find a ref other than it was a moment before, as a push came in between; then it stays for now."""


class Doomed(NamedTuple):
    """A ref to delete, and what it must be at; without *expected_oid* it goes whatever it is."""

    ref: str
    expected_oid: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one ref; one that is locked is still there and may go another time."""

    state: Literal["deleted", "gone", "moved", "rejected", "locked"]
    reason: str | None = None


Before = Callable[[Mapping[Doomed, str]], None]
"""Is told, right before git is asked, what stands to go and what it was: an oid, `ref: NAME` of a symbolic ref.

That is "" where it cannot be told.
"""

DELETED = Outcome("deleted")
GONE = Outcome("gone")
MOVED = Outcome("moved", "moved")
DEFAULT_BRANCH = Outcome("rejected", "default_branch")
TOO_LONG_TO_LOCK = Outcome("rejected", "too_long_to_lock")


def behind(other: bytes) -> Outcome:
    """Refuse a ref that git cannot lock, as the file of *other* lies where a folder of its name would."""
    return Outcome(
        "rejected",
        f"name_conflict: {other.decode()} stands in its way; delete that, then `forgekeeper quarantine retry`",
    )


def locked(reason: str) -> Outcome:
    """Say that a ref could not be deleted this time, and why."""
    return Outcome("locked", reason)


def delete(
    root: Path,
    disk_path: str,
    doomed: Sequence[Doomed],
    *,
    until: float,
    grace: float = 5.0,
    before: Before | None = None,
) -> dict[Doomed, Outcome]:
    """Delete refs of the repository at *disk_path*; say what became of each.

    A symbolic ref is deleted itself, never its target.  Of several rows with the same ref each
    is judged by its own expectation, and one that agrees is enough.  Expectations are verified
    by git inside the transaction: a push that comes first wins.

    Where there is *before*, it is told of each ref before that can be deleted, and git deletes none
    that is not what it was told; one that has moved since is looked at and told of anew.

    Git is ended at *until*, an instant of the monotonic clock, and killed *grace* seconds later.
    Raises `RootUnavailable`, `RepositoryMissing`, `RepositoryLocked`, `RepositoryFailed`,
    `GitTimedOut` and `GitUnavailable`; some of the refs may then have been deleted, and to
    delete them again is harmless.
    """
    insist("by git")
    outcomes, rows = _sorted_out(doomed)
    if rows:
        repository = open_repository(root, disk_path)
        _Deletion(repository, Git(repository.git_dir, until, grace), rows, outcomes, before).run()
    return outcomes


def foresee(
    root: Path, disk_path: str, doomed: Sequence[Doomed], *, until: float, grace: float = 5.0
) -> dict[Doomed, Outcome]:
    """Say what `delete` would come to at this moment, by the same looks; nothing is locked or written.

    Raises what that raises.
    """
    outcomes, rows = _sorted_out(doomed)
    if rows:
        repository = open_repository(root, disk_path)
        _Deletion(repository, Git(repository.git_dir, until, grace), rows, outcomes, None).only_look()
    return outcomes


def _sorted_out(doomed: Sequence[Doomed]) -> tuple[dict[Doomed, Outcome], dict[bytes, list[Doomed]]]:
    """Return what git must not see, refused, and the rows of each ref that it may."""
    outcomes: dict[Doomed, Outcome] = {}
    rows: dict[bytes, list[Doomed]] = {}
    for row in doomed:
        reason = refusal(row.ref)
        if reason is None:
            rows.setdefault(row.ref.encode(), []).append(row)
        else:
            outcomes[row] = Outcome("rejected", reason)
    return outcomes, rows


@dataclass
class _Deletion:
    """One call: the rows of each ref that are still open, and what has become of the others."""

    repository: Repository
    git: Git
    rows: dict[bytes, list[Doomed]]
    outcomes: dict[Doomed, Outcome]
    before: Before | None
    _values: Values = field(default_factory=Values)
    _told: dict[bytes, str] = field(default_factory=dict)
    _changes: Counter[bytes] = field(default_factory=Counter)

    def run(self) -> None:
        # What lies elsewhere says nothing of what is gone.
        self.repository.enclose(self.rows)
        parts = [sorted(self.rows)]
        complaint = b""
        for _ in range(TRANSACTIONS):
            standing = self._look(parts.pop())
            complaint = self._transact(standing)
            if complaint:
                parts += filter(None, self._judge(complaint, standing))
            else:
                self._settle_all(standing, DELETED)
            if not parts:
                # Only now is it certain that what was not there had not merely gone out of sight.
                self.repository.confirm()
                return
        raise self._failure(complaint)

    def only_look(self) -> None:
        """Settle all as a transaction would, if nobody held a lock any longer than now."""
        self.repository.enclose(self.rows)
        standing = self._look(sorted(self.rows))
        whole = self.repository.locked([PACKED_REFS])
        held = standing if whole else self.repository.locked(standing)
        self._settle_all(dict.fromkeys(held, NO_VALUE), locked("another process holds its lock"))
        self._settle_all(standing, DELETED)
        self.repository.confirm()

    def _look(self, names: list[bytes]) -> dict[bytes, bytes]:
        """Settle what need not go to git; return the others with the value that each must have."""
        protected = self._default_branch()
        self._values = look(self.git, self.repository, names)
        values = self._values.oids
        can_lock = self.repository.can_lock()
        standing = {}
        for name in names:
            if name in protected:
                self._settle(name, DEFAULT_BRANCH)
            elif name in self._values.broken:
                # Git deletes none that it cannot read.
                self._settle(name, locked("the ref is broken"))
            elif name not in values and not self._has_file(name):
                self._settle(name, GONE)
            elif not self._agreeing(name, values.get(name)):
                continue
            elif not can_lock(name):
                # Packed by a clone, which locks none.  No deletion ever can.
                self._settle(name, TOO_LONG_TO_LOCK)
            elif other := self.repository.in_the_way(name):
                self._settle(name, locked(f"{other.decode()} goes first") if self.rows.get(other) else behind(other))
            else:
                standing[name] = self._required(name, values.get(name, NO_VALUE))
        return standing

    def _required(self, name: bytes, value: bytes) -> bytes:
        """Return what git shall verify that the ref is at."""
        whatever = any(row.expected_oid is None for row in self.rows[name])
        return NO_VALUE if whatever and self.before is None else value

    def _has_file(self, name: bytes) -> bool:
        """Say whether a file says that there is a ref of that name; settle what cannot be looked at."""
        try:
            return self.repository.has_file(name)
        except OSError as error:
            self._settle(name, locked(f"it cannot be looked at: {error.strerror}"))
            return False

    def _agreeing(self, name: bytes, value: bytes | None) -> bool:
        """Settle the rows that expect another value; say whether there are any that do not.

        A ref without a value, as a symbolic one without a target, is not what anybody expects.
        """
        agreeing = []
        for row in self.rows[name]:
            if row.expected_oid is None or (value and row.expected_oid.lower() == value.decode()):
                agreeing.append(row)
            else:
                self.outcomes[row] = MOVED
        self.rows[name] = agreeing
        return bool(agreeing)

    def _default_branch(self) -> set[bytes]:
        """Return what HEAD names, whether it exists or not, and what that leads to; nothing if HEAD is detached."""
        branch = set()
        for options in ([], ["--no-recurse"]):
            with self.git.run("symbolic-ref", "--quiet", *options, "HEAD") as answer:
                # 1 is a detached HEAD; 129 an old git, which does not know the option.
                if answer.code == 0:
                    branch.add(answer.out.read().rstrip(b"\n"))
                elif answer.code not in (1, 129):
                    raise self._failure(answer.complaint())
        return branch

    def _transact(self, standing: Mapping[bytes, bytes]) -> bytes:
        """Delete all or nothing; return what git has against it."""
        if not standing:
            return b""
        self._tell(standing)
        self.repository.enclose(standing)
        commands = [b"start", *(b"delete %s\0%s" % item for item in standing.items()), b"prepare", b"commit", b""]
        try:
            with self.git.run(
                *("update-ref", "--stdin", "-z", "--no-deref"), given=b"\0".join(commands), config=self._patience()
            ) as answer:
                # The status alone would also be 0 if git had read no more than half of it.
                if answer.code == 0 and answer.out.read().endswith(b"commit: ok\n"):
                    return b""
                if answer.code < 0:
                    raise self._failure(answer.complaint())
                return answer.complaint()
        except GitTimedOut as error:
            if error.killed:
                error.locks = tuple(self._locks(standing))
            raise

    def _tell(self, standing: Mapping[bytes, bytes]) -> None:
        """Say what stands to go, unless that has been said."""
        if self.before is None:
            return
        was = {name: self._values.shown(name, self.repository) for name in standing}
        new = {name: value for name, value in was.items() if self._told.get(name) != value}
        if new:
            self.before({row: value for name, value in new.items() for row in self.rows[name]})
            self._told |= new

    def _patience(self) -> dict[str, str]:
        """Wait for locks no longer than leaves time to say so."""
        limits = {"core.packedRefsTimeout": PACKED_REFS_PATIENCE, "core.filesRefLockTimeout": REF_PATIENCE}
        longest = self.git.left() / 2
        return {name: str(max(0, int(1_000 * min(limit, longest)))) for name, limit in limits.items()}

    def _locks(self, standing: Mapping[bytes, bytes]) -> Iterator[str]:
        for name in ("packed-refs.lock", "packed-refs.new"):
            if (self.repository.git_dir / name).exists():
                yield name
        for ref in self.repository.locked(standing):
            yield ref.decode() + ".lock"

    def _judge(self, said: bytes, standing: Mapping[bytes, bytes]) -> list[list[bytes]]:
        """Settle what git complains about; return what to try again, in parts if that is not clear."""
        names = list(standing)
        complaint = understand(said, self.repository.git_dir)
        if complaint.lock is not None:
            self._give_way(complaint.lock, standing)
        elif complaint.general:
            raise self._failure(said)
        elif complaint.ref is not None and complaint.ref in standing:
            if complaint.became == "changed":
                self._look_again(complaint.ref, complaint.text)
            else:
                self._settle(complaint.ref, TOO_LONG_TO_LOCK if complaint.became else locked(complaint.text))
        elif len(names) == 1:
            self._settle(names[0], locked(complaint.text))
        else:
            half = len(names) // 2
            return [names[half:], names[:half]]
        return [[name for name in names if self.rows[name]]]

    def _look_again(self, name: bytes, text: str) -> None:
        """Leave a ref open, as only a look says what it is; where git never agrees with the look, it stays for now."""
        self._changes[name] += 1
        if self._changes[name] >= CHANGES:
            self._settle(name, locked(text))

    def _give_way(self, lock: bytes, standing: Mapping[bytes, bytes]) -> None:
        name = lock.removesuffix(b".lock")
        if name not in standing:
            path = os.fsdecode(lock)
            raise RepositoryLocked(path, self.repository.ages([path]).get(path))
        # A git that was killed may have left thousands.
        held = {each: each.decode() + ".lock" for each in {name, *self.repository.locked(standing)}}
        ages = self.repository.ages(held.values())
        for each, path in held.items():
            old = f", {ages[path]} old" if path in ages else ""
            self._settle(each, locked("another process holds its lock" + old))

    def _settle_all(self, names: Mapping[bytes, bytes], outcome: Outcome) -> None:
        for name in names:
            self._settle(name, outcome)

    def _settle(self, name: bytes, outcome: Outcome) -> None:
        self.outcomes.update(dict.fromkeys(self.rows[name], outcome))
        self.rows[name] = []

    def _failure(self, complaint: bytes) -> RepositoryFailed:
        """Return what git complains about, unless it is that root or repository have gone."""
        self.repository.confirm()
        return RepositoryFailed(legible(complaint))

"""Delete refs in bulk: ten thousand in one transaction, and one that cannot go keeps no other.

Each transaction that touches packed refs rewrites their file, so all go in one.  Git refuses a transaction as a whole:
what it would refuse is looked for and left out first, and what it refuses then is left out too before the next try.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from forgekeeper.database.sessions import insist
from forgekeeper.storage.git_command import Git, legible, understand
from forgekeeper.storage.git_repository import Repository, RepositoryFailed, Values, look, open_repository, refusal

TRANSACTIONS = 64
"""How often git is asked at most; each time but the last it has refused."""
NO_VALUE = b""
"""In a transaction: delete the ref whatever it is.  Of a symbolic ref that leads nowhere git verifies no value."""
CHANGES = 10
"""How often git may find a ref other than it was a moment before, as a push came in between; then it stays for now."""


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
"""Called right before git is, with what is about to go and what it was, as `Values.shown` says it."""

DELETED = Outcome("deleted")
GONE = Outcome("gone")
MOVED = Outcome("moved", "moved")
DEFAULT_BRANCH = Outcome("rejected", "default_branch")
TOO_LONG_TO_LOCK = Outcome("rejected", "too_long_to_lock")  # packed by a clone, which locks none; no deletion ever can
LOCKED = Outcome("locked", "another process holds its lock")


def delete(
    root: Path,
    disk_path: str,
    doomed: Sequence[Doomed],
    *,
    until: float,
    grace: float = 5.0,
    before: Before = lambda _going: None,
) -> dict[Doomed, Outcome]:
    """Delete refs of the repository at *disk_path*; return what became of each.

    A symbolic ref is deleted itself, never its target.  Of several rows with the same ref each is judged by its own
    expectation, and one that agrees is enough.  What each ref is at is verified by git inside the transaction: of what
    a push has changed since we looked nothing goes that was expected otherwise.  *before* is called with each ref
    before that can be deleted, and git deletes none that is not what *before* was called with; one that has moved since
    is looked at again.

    Git is ended at *until*, an instant of the monotonic clock, and killed *grace* seconds later.
    Raises `GitError`; some of the refs may then have been deleted, and to delete them again is harmless.
    """
    insist("by git")
    deletion = _Deletion(doomed, before)
    if deletion.rows:
        deletion.begin(root, disk_path, until, grace).run()
    return deletion.outcomes


def preview(
    root: Path, disk_path: str, doomed: Sequence[Doomed], *, until: float, grace: float = 5.0
) -> dict[Doomed, Outcome]:
    """Return what `delete` would now, by the same looks; nothing is locked or written.  Raises `GitError`."""
    deletion = _Deletion(doomed, lambda _going: None)
    if deletion.rows:
        deletion.begin(root, disk_path, until, grace).only_look()
    return deletion.outcomes


class _Deletion:
    """One call: the *rows* of each ref that are still open, and the *outcomes* of the others."""

    _repository: Repository
    _git: Git

    def __init__(self, doomed: Sequence[Doomed], before: Before) -> None:
        self.outcomes: dict[Doomed, Outcome] = {}
        self.rows: dict[bytes, list[Doomed]] = {}
        self._before = before
        self._values = Values()
        self._announced: dict[bytes, str] = {}
        self._changes = Counter[bytes]()
        for row in doomed:
            # Git must not see what is refused.
            if reason := refusal(row.ref):
                self.outcomes[row] = Outcome("rejected", reason)
            else:
                self.rows.setdefault(row.ref.encode(), []).append(row)

    def begin(self, root: Path, disk_path: str, until: float, grace: float) -> _Deletion:
        self._repository = open_repository(root, disk_path)
        self._git = Git(self._repository.git_dir, until, grace)
        # What lies elsewhere says nothing of what is gone.
        self._repository.enclose(self.rows)
        return self

    def run(self) -> None:
        parts, complaint = [sorted(self.rows)], b""
        for _ in range(TRANSACTIONS):
            standing = self._look(parts.pop())
            complaint = self._transact(standing)
            if complaint:
                parts += filter(None, self._judge(complaint, standing))
            else:
                self._settle(standing, DELETED)
            if not parts:
                # Only now is it certain that what was not there had not merely gone out of sight.
                self._repository.confirm()
                return
        raise self._failure(complaint)

    def only_look(self) -> None:
        """Settle all as a transaction would, if every lock that is held now stayed held."""
        standing = self._look(sorted(self.rows))
        all_locked = self._repository.locked([b"packed-refs"])
        self._settle(standing if all_locked else self._repository.locked(standing), LOCKED)
        self._settle(standing, DELETED)
        self._repository.confirm()

    def _look(self, names: list[bytes]) -> dict[bytes, bytes]:
        """Settle what need not go to git; return the others with the value that git shall verify of each."""
        protected = self._default_branch()
        self._values = look(self._git, self._repository, names)
        standing = {}
        for name in names:
            value = self._values.oids.get(name)
            outcome = self._without_git(name, value, protected)
            if outcome is None and self._agreeing(name, value):
                outcome = self._unlockable(name)
                if outcome is None:
                    standing[name] = value or NO_VALUE
            if outcome is not None:
                self._settle([name], outcome)
        return standing

    def _without_git(self, name: bytes, value: bytes | None, protected: set[bytes]) -> Outcome | None:
        """Return what becomes of a ref that is not git's to delete."""
        if name in protected:
            return DEFAULT_BRANCH
        if name in self._values.broken:
            # Git deletes none that it cannot read.
            return Outcome("locked", "the ref is broken")
        try:
            return GONE if value is None and not self._repository.has_file(name) else None
        except OSError as error:
            return Outcome("locked", f"it cannot be looked at: {error.strerror}")

    def _agreeing(self, name: bytes, value: bytes | None) -> bool:
        """Settle the rows that expect another value; return whether there are any that do not.

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

    def _unlockable(self, name: bytes) -> Outcome | None:
        """Return what becomes of a ref that git cannot lock."""
        if not self._repository.can_lock(name):
            return TOO_LONG_TO_LOCK
        if not (other := self._repository.in_the_way(name)):
            return None
        if self.rows.get(other):
            return Outcome("locked", f"{other.decode()} goes first")
        cure = "stands in its way; delete that, then `forgekeeper quarantine retry`"
        return Outcome("rejected", f"name_conflict: {other.decode()} {cure}")

    def _default_branch(self) -> set[bytes]:
        """Return what HEAD names, whether it exists or not, and what that leads to; nothing if HEAD is detached."""
        branch = set()
        for options in ([], ["--no-recurse"]):
            answer = self._git.run("symbolic-ref", "--quiet", *options, "HEAD")
            # 1 is a detached HEAD; 129 an old git, which does not know the option.
            if answer.code == 0:
                branch.add(answer.out.rstrip(b"\n"))
            elif answer.code not in (1, 129):
                raise self._failure(answer.complaint())
        return branch

    def _transact(self, standing: Mapping[bytes, bytes]) -> bytes:
        """Delete all or nothing; return what git has against it."""
        if not standing:
            return b""
        self._announce(standing)
        self._repository.enclose(standing)
        commands = [b"start", *(b"delete %s\0%s" % item for item in standing.items()), b"prepare", b"commit", b""]
        answer = self._git.run("update-ref", "--stdin", "-z", "--no-deref", given=b"\0".join(commands))
        if answer.code < 0:
            raise self._failure(answer.complaint())
        return b"" if answer.committed else answer.complaint()

    def _announce(self, standing: Iterable[bytes]) -> None:
        """Call *before* with what is about to go, unless it was called with that."""
        was = {name: self._values.shown(name, self._repository) for name in standing}
        new = {name: value for name, value in was.items() if self._announced.get(name) != value}
        if new:
            self._before({row: value for name, value in new.items() for row in self.rows[name]})
            self._announced |= new

    def _judge(self, said: bytes, standing: Mapping[bytes, bytes]) -> list[list[bytes]]:
        """Settle what git complains about; return what to try again, in parts if that is not clear."""
        names = list(standing)
        complaint = understand(said, self._repository.git_dir)
        if complaint.lock is not None:
            self._leave_locked(complaint.lock, standing)
        elif complaint.general:
            raise self._failure(said)
        elif complaint.ref is not None and complaint.ref in standing:
            self._changes[complaint.ref] += 1
            if not complaint.changed or self._changes[complaint.ref] >= CHANGES:
                self._settle([complaint.ref], Outcome("locked", complaint.text))
        elif len(names) == 1:
            self._settle(names, Outcome("locked", complaint.text))
        else:
            half = len(names) // 2
            return [names[half:], names[:half]]
        return [[name for name in names if self.rows[name]]]

    def _leave_locked(self, lock: bytes, standing: Mapping[bytes, bytes]) -> None:
        name = lock.removesuffix(b".lock")
        if name not in standing:
            path = os.fsdecode(lock)
            age = self._repository.age(path)
            raise RepositoryFailed(f"{path} is held" + ("" if age is None else f", {age} old"))
        # A git that was killed may have left thousands.
        self._settle({name, *self._repository.locked(standing)}, LOCKED)

    def _settle(self, names: Iterable[bytes], outcome: Outcome) -> None:
        for name in names:
            self.outcomes |= dict.fromkeys(self.rows[name], outcome)
            self.rows[name] = []

    def _failure(self, complaint: bytes) -> RepositoryFailed:
        """Return what git complains about, unless root or repository have gone."""
        self._repository.confirm()
        return RepositoryFailed(legible(complaint))

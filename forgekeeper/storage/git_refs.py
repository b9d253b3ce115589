"""Delete refs in bulk: ten thousand in one transaction, and one that cannot go keeps no other.

Each transaction that touches packed refs rewrites their file, so all go in one.  Git refuses a transaction as a whole:
what it would refuse is looked for and left out first, and what it refuses then is left out too before the next try.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from forgekeeper.database.writes import insist
from forgekeeper.storage.git_command import Git, legible
from forgekeeper.storage.git_complaints import understand
from forgekeeper.storage.git_repository import Repository, RepositoryFailed, RepositoryLocked, open_repository
from forgekeeper.storage.git_values import Values, look
from forgekeeper.storage.ref_names import refusal

TRANSACTIONS = 64
"""How often git is asked at most; each time but the last it has refused."""

PACKED_REFS = b"packed-refs"

NO_VALUE = b""
"""In a transaction: delete the ref whatever it is."""

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
"""Called right before git is, with what is about to go and what it was: an oid, `ref: NAME` of a symbolic ref.

That is "" where nothing can say it.
"""

DELETED = Outcome("deleted")
GONE = Outcome("gone")
MOVED = Outcome("moved", "moved")
DEFAULT_BRANCH = Outcome("rejected", "default_branch")
TOO_LONG_TO_LOCK = Outcome("rejected", "too_long_to_lock")
LOCKED = Outcome("locked", "another process holds its lock")


def delete(
    root: Path,
    disk_path: str,
    doomed: Sequence[Doomed],
    *,
    until: float,
    grace: float = 5.0,
    before: Before | None = None,
) -> dict[Doomed, Outcome]:
    """Delete refs of the repository at *disk_path*; return what became of each.

    A symbolic ref is deleted itself, never its target.  Of several rows with the same ref each
    is judged by its own expectation, and one that agrees is enough.  Expectations are verified
    by git inside the transaction: a push that comes first wins.

    *before* is called with each ref before that can be deleted, and git deletes none that is not what *before* was
    called with; one that has moved since is looked at again.

    Git is ended at *until*, an instant of the monotonic clock, and killed *grace* seconds later.
    Raises `GitError`; some of the refs may then have been deleted, and to delete them again is harmless.
    """
    insist("by git")
    outcomes, rows = _sorted_out(doomed)
    if rows:
        repository = open_repository(root, disk_path)
        _Deletion(repository, Git(repository.git_dir, until, grace), rows, outcomes, before).run()
    return outcomes


def preview(
    root: Path, disk_path: str, doomed: Sequence[Doomed], *, until: float, grace: float = 5.0
) -> dict[Doomed, Outcome]:
    """Return what `delete` would at this moment, by the same looks; nothing is locked or written.

    Raises `GitError`.
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
        if reason := refusal(row.ref):
            outcomes[row] = Outcome("rejected", reason)
        else:
            rows.setdefault(row.ref.encode(), []).append(row)
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
    _announced: dict[bytes, str] = field(default_factory=dict)
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
        """Settle all as a transaction would, if every lock that is held now stayed held."""
        self.repository.enclose(self.rows)
        standing = self._look(sorted(self.rows))
        all_locked = self.repository.locked([PACKED_REFS])
        self._settle_all(standing if all_locked else self.repository.locked(standing), LOCKED)
        self._settle_all(standing, DELETED)
        self.repository.confirm()

    def _look(self, names: list[bytes]) -> dict[bytes, bytes]:
        """Settle what need not go to git; return the others with the value that each must have."""
        protected = self._default_branch()
        self._values = look(self.git, self.repository, names)
        standing = {}
        for name in names:
            value = self._values.oids.get(name)
            if outcome := self._without_git(name, value, protected):
                self._settle(name, outcome)
            elif self._agreeing(name, value):
                if outcome := self._unlockable(name):
                    self._settle(name, outcome)
                else:
                    standing[name] = self._required(name, value or NO_VALUE)
        return standing

    def _without_git(self, name: bytes, value: bytes | None, protected: set[bytes]) -> Outcome | None:
        """Return what becomes of a ref that is not git's to delete."""
        if name in protected:
            return DEFAULT_BRANCH
        if name in self._values.broken:
            # Git deletes none that it cannot read.
            return Outcome("locked", "the ref is broken")
        try:
            return GONE if value is None and not self.repository.has_file(name) else None
        except OSError as error:
            return Outcome("locked", f"it cannot be looked at: {error.strerror}")

    def _unlockable(self, name: bytes) -> Outcome | None:
        """Return what becomes of a ref that git cannot lock."""
        if not self.repository.can_lock(name):
            # Packed by a clone, which locks none.  No deletion ever can.
            return TOO_LONG_TO_LOCK
        if not (other := self.repository.in_the_way(name)):
            return None
        if self.rows.get(other):
            return Outcome("locked", f"{other.decode()} goes first")
        cure = "stands in its way; delete that, then `forgekeeper refs retry`"
        return Outcome("rejected", f"name_conflict: {other.decode()} {cure}")

    def _required(self, name: bytes, value: bytes) -> bytes:
        """Return what git shall verify that the ref is at."""
        whatever = any(row.expected_oid is None for row in self.rows[name])
        return NO_VALUE if whatever and self.before is None else value

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
        self._announce(standing)
        self.repository.enclose(standing)
        commands = [b"start", *(b"delete %s\0%s" % item for item in standing.items()), b"prepare", b"commit", b""]
        with self.git.run("update-ref", "--stdin", "-z", "--no-deref", given=b"\0".join(commands)) as answer:
            # The status alone would also be 0 if git had read no more than half of it.
            if answer.code == 0 and answer.out.read().endswith(b"commit: ok\n"):
                return b""
            if answer.code < 0:
                raise self._failure(answer.complaint())
            return answer.complaint()

    def _announce(self, standing: Mapping[bytes, bytes]) -> None:
        """Call *before* with what is about to go, unless it was called with that."""
        if self.before is None:
            return
        was = {name: self._values.shown(name, self.repository) for name in standing}
        new = {name: value for name, value in was.items() if self._announced.get(name) != value}
        if new:
            self.before({row: value for name, value in new.items() for row in self.rows[name]})
            self._announced |= new

    def _judge(self, said: bytes, standing: Mapping[bytes, bytes]) -> list[list[bytes]]:
        """Settle what git complains about; return what to try again, in parts if that is not clear."""
        names = list(standing)
        complaint = understand(said, self.repository.git_dir)
        if complaint.lock is not None:
            self._leave_locked(complaint.lock, standing)
        elif complaint.general:
            raise self._failure(said)
        elif complaint.ref is not None and complaint.ref in standing:
            self._changes[complaint.ref] += 1
            if complaint.became == "too long":
                self._settle(complaint.ref, TOO_LONG_TO_LOCK)
            elif complaint.became is None or self._changes[complaint.ref] >= CHANGES:
                self._settle(complaint.ref, Outcome("locked", complaint.text))
        elif len(names) == 1:
            self._settle(names[0], Outcome("locked", complaint.text))
        else:
            half = len(names) // 2
            return [names[half:], names[:half]]
        return [[name for name in names if self.rows[name]]]

    def _leave_locked(self, lock: bytes, standing: Mapping[bytes, bytes]) -> None:
        name = lock.removesuffix(b".lock")
        if name not in standing:
            path = os.fsdecode(lock)
            age = self.repository.age(path)
            raise RepositoryLocked(f"{path} is held" + ("" if age is None else f", {age} old"))
        # A git that was killed may have left thousands.
        self._settle_all({name, *self.repository.locked(standing)}, LOCKED)

    def _settle_all(self, names: Iterable[bytes], outcome: Outcome) -> None:
        for name in names:
            self._settle(name, outcome)

    def _settle(self, name: bytes, outcome: Outcome) -> None:
        self.outcomes.update(dict.fromkeys(self.rows[name], outcome))
        self.rows[name] = []

    def _failure(self, complaint: bytes) -> RepositoryFailed:
        """Return what git complains about, unless root or repository have gone."""
        self.repository.confirm()
        return RepositoryFailed(legible(complaint))

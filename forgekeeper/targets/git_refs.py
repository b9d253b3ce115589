"""Delete refs in bulk: ten thousand in one transaction; a failing ref keeps back no other.

Each transaction with packed refs rewrites their file, so one transaction deletes all refs.  Git refuses a transaction
as a whole, so refs that it would refuse are found and left out first.  If it refuses a further ref, the next try leaves
that ref out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from forgekeeper.platform.database.sessions import insist
from forgekeeper.targets.git_command import Git, legible, understand
from forgekeeper.targets.git_repository import Repository, RepositoryFailed, Values, look, open_repository, refusal

MAX_TRANSACTIONS = 64
"""Maximum transactions per call: git has refused each but the last."""
NO_VALUE = b""
"""In a transaction: delete the ref at any value.  Git verifies no value of a symbolic ref without a target."""


class Doomed(NamedTuple):
    """A ref to delete, and the oid that it must have.

    Without *expected_oid* it is deleted at the announced value.
    """

    ref: str
    expected_oid: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one ref; a locked ref still exists and may be deleted another time."""

    state: Literal["deleted", "gone", "moved", "rejected", "locked"]
    reason: str | None = None


Announce = Callable[[Mapping[Doomed, str]], None]
"""Records the refs that are about to be deleted, each with its value as `Values.shown` returns it."""
FindLost = Callable[[], Collection[Doomed]]
"""Returns rows that the caller must no longer delete; called while git holds the locks of their refs."""

DELETED = Outcome("deleted")
GONE = Outcome("gone")
MOVED = Outcome("moved", "moved")
DEFAULT_BRANCH = Outcome("rejected", "default_branch")
TOO_LONG_TO_LOCK = Outcome("rejected", "too_long_to_lock")  # packed by a clone, which locks none; no deletion ever can
LOCKED = Outcome("locked", "another process holds its lock")
CHANGED = Outcome("locked", "it has changed since it was looked at")
LOST = Outcome("locked", "another process has closed its row")


def delete(
    root: Path,
    disk_path: str,
    doomed: Sequence[Doomed],
    *,
    until: float,
    grace: float = 5.0,
    announce: Announce = lambda _values: None,
    find_lost: FindLost = tuple,
) -> dict[Doomed, Outcome]:
    """Delete refs of a repository, each at its announced value; return each outcome.

    *announce* is called once, with all refs that git is about to delete.  Git then verifies these values and locks the
    refs, *find_lost* is called, and git deletes the other refs.  So neither a push nor a pause of this process, however
    long, lets a ref be deleted at another value or after its row was closed.  A ref that has changed since stays: as
    moved if its row expects a value, else for the next call.

    A symbolic ref is deleted itself, never its target.  Several rows may name one ref: each is judged by its own
    expectation, and one agreeing row is enough to delete the ref.

    Git is ended at *until*, an instant of the monotonic clock, and killed *grace* seconds later.  Raises `GitError`;
    some refs may then have been deleted, and deleting them again is harmless.  Errors of *announce* and *find_lost*
    are raised; then no ref of that transaction is deleted.
    """
    insist("by git")
    deletion = _Deletion(doomed)
    if deletion.rows:
        deletion.begin(root, disk_path, until, grace, writes=True).run(announce, find_lost)
    return deletion.outcomes


def preview(
    root: Path, disk_path: str, doomed: Sequence[Doomed], *, until: float, grace: float = 5.0
) -> dict[Doomed, Outcome]:
    """Return the outcomes that `delete` would have now; locks and writes nothing.

    Raises `GitError`.
    """
    deletion = _Deletion(doomed)
    if deletion.rows:
        deletion.begin(root, disk_path, until, grace, writes=False).only_look()
    return deletion.outcomes


class _Deletion:
    """One call: the *rows* of each ref that are still open, and the *outcomes* of the others."""

    _repository: Repository
    _git: Git

    def __init__(self, doomed: Sequence[Doomed]) -> None:
        self.outcomes: dict[Doomed, Outcome] = {}
        self.rows: dict[bytes, list[Doomed]] = {}
        self._values = Values()
        self._announced: dict[bytes, str] = {}
        for row in doomed:
            # Git must not see a refused name.
            if reason := refusal(row.ref):
                self.outcomes[row] = Outcome("rejected", reason)
            else:
                self.rows.setdefault(row.ref.encode(), []).append(row)

    def begin(self, root: Path, disk_path: str, until: float, grace: float, *, writes: bool) -> _Deletion:
        self._repository = open_repository(root, disk_path)
        self._git = self._repository.writer(until, grace) if writes else Git(self._repository.git_dir, until, grace)
        # Refs in another folder prove nothing about missing ones.
        self._repository.enclose(self.rows)
        return self

    def run(self, announce: Announce, find_lost: FindLost) -> None:
        parts, complaint = [self._look(sorted(self.rows))], b""
        self._announced = {name: self._values.shown(name, self._repository) for name in parts[0]}
        if self._announced:
            announce({row: value for name, value in self._announced.items() for row in self.rows[name]})
        for _ in range(MAX_TRANSACTIONS):
            standing = self._still_open(parts.pop())
            complaint = self._transact(standing, find_lost)
            if complaint:
                parts += self._judge(complaint, standing)
            elif left := self._still_open(standing):
                parts.append(left)
            if not parts:
                # Missing refs may only have been on a disk out of sight: this check makes their outcome certain.
                self._repository.confirm()
                return
        raise self._failure(complaint)

    def _still_open(self, standing: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        return {name: value for name, value in standing.items() if self.rows[name]}

    def only_look(self) -> None:
        """Settle all refs as a transaction would if every present lock stayed held."""
        standing = self._look(sorted(self.rows))
        all_locked = self._repository.locked([b"packed-refs"])
        self._settle(standing if all_locked else self._repository.locked(standing), LOCKED)
        self._settle(standing, DELETED)
        self._repository.confirm()

    def _look(self, names: list[bytes]) -> dict[bytes, bytes]:
        """Settle refs that git need not see; return the others with the values to verify."""
        protected = self._protected_branches()
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
        """Return the outcome of a ref that git must not delete, None of any other."""
        if name in protected:
            return DEFAULT_BRANCH
        if name in self._values.broken:
            # Git deletes no ref that it cannot read.
            return Outcome("locked", "the ref is broken")
        try:
            return GONE if value is None and not self._repository.has_file(name) else None
        except OSError as error:
            return Outcome("locked", f"it cannot be looked at: {error.strerror}")

    def _agreeing(self, name: bytes, value: bytes | None) -> bool:
        """Settle the rows that expect another value; return whether other rows are left.

        A ref without a value, such as a symbolic ref without a target, meets no expectation.
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
        """Return the outcome of a ref that git cannot lock, None for any other ref."""
        if not self._repository.can_lock(name):
            return TOO_LONG_TO_LOCK
        if not (other := self._repository.in_the_way(name)):
            return None
        if self.rows.get(other):
            return Outcome("locked", f"{other.decode()} goes first")
        cure = "stands in its way; delete that, then `forgekeeper quarantine retry`"
        return Outcome("rejected", f"name_conflict: {other.decode()} {cure}")

    def _protected_branches(self) -> set[bytes]:
        """Return each ref that HEAD leads to, whether it exists or not; none if HEAD is detached."""
        answer = self._git.run("symbolic-ref", "--quiet", "HEAD")
        if answer.code not in (0, 1):  # 1 is a detached HEAD
            raise self._failure(answer.complaint())
        return {*answer.out.split(), *self._repository.links_from(self._git, b"HEAD")}

    def _transact(self, standing: Mapping[bytes, bytes], find_lost: FindLost) -> bytes:
        """Delete all refs and settle them, or delete none; return git's complaint.

        Refs that must stay, as found while git holds the locks, are settled, and no ref is deleted.
        """
        if not standing:
            return b""

        def may_commit() -> bool:
            self._settle_lost(find_lost())
            self._settle(self._changed(standing), CHANGED)
            return self._still_open(standing) == standing

        self._repository.enclose(standing)
        answer = self._git.update_refs((b"delete %s\0%s" % item for item in standing.items()), confirm=may_commit)
        if answer.committed:
            self._settle(standing, DELETED)
        elif self._still_open(standing) == standing:
            if answer.code < 0:
                raise self._failure(answer.complaint())
            return answer.complaint()
        return b""

    def _changed(self, standing: Mapping[bytes, bytes]) -> set[bytes]:
        """Return the refs that have changed although git has verified all that it can.

        Git verifies the value of a symbolic ref's target, not its target.  HEAD may also lead to another branch by now.
        """
        links = [name for name, value in standing.items() if not value or value.decode() != self._announced[name]]
        values = look(self._git, self._repository, links)
        changed = {name for name in links if values.shown(name, self._repository) != self._announced[name]}
        return changed | (standing.keys() & self._repository.links_from(self._git, b"HEAD"))

    def _settle_lost(self, lost: Collection[Doomed]) -> None:
        for row in lost:
            if row in (rows := self.rows.get(row.ref.encode(), [])):
                self.outcomes[row] = LOST
                rows.remove(row)

    def _judge(self, said: bytes, standing: Mapping[bytes, bytes]) -> list[dict[bytes, bytes]]:
        """Settle the ref of git's complaint; return the refs to retry.

        They are halved if the ref is not clear.
        """
        complaint = understand(said, self._repository.git_dir)
        if complaint.lock is not None:
            self._leave_locked(complaint.lock, standing)
        elif complaint.general:
            raise self._failure(said)
        elif complaint.ref is not None and complaint.ref in standing:
            # A changed ref is looked at again; rows that stay open after that wait for the next call.
            left = self._look([complaint.ref]) if complaint.changed else standing
            self._settle(
                left.keys() & {complaint.ref}, CHANGED if complaint.changed else Outcome("locked", complaint.text)
            )
        elif len(standing) == 1:
            self._settle(standing, Outcome("locked", complaint.text))
        else:
            names = list(standing)
            half = len(names) // 2
            return [{name: standing[name] for name in part} for part in (names[half:], names[:half])]
        left = self._still_open(standing)
        return [left] if left else []

    def _leave_locked(self, lock: bytes, standing: Mapping[bytes, bytes]) -> None:
        name = lock.removesuffix(b".lock")
        if name not in standing:
            path = os.fsdecode(lock)
            age = self._repository.age(path)
            raise RepositoryFailed(f"{path} is held" + ("" if age is None else f", {age} old"))
        # A killed git may have left thousands of locks.
        self._settle({name, *self._repository.locked(standing)}, LOCKED)

    def _settle(self, names: Iterable[bytes], outcome: Outcome) -> None:
        for name in names:
            self.outcomes |= dict.fromkeys(self.rows[name], outcome)
            self.rows[name] = []

    def _failure(self, complaint: bytes) -> RepositoryFailed:
        """Return git's complaint as an error, or raise another if root or repository are missing."""
        self._repository.confirm()
        return RepositoryFailed(legible(complaint))

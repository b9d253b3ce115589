"""Delete refs in bulk: ten thousand in one transaction; a failing ref keeps back no other.

Each transaction with packed refs rewrites their file, so one transaction deletes all refs.  Git refuses a transaction
as a whole, so refs that it would refuse are found and left out first.  If it refuses a further ref, the next try leaves
that ref out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from forgekeeper.platform.database.sessions import require_engine
from forgekeeper.targets.git_command import Git, clean_first_line, parse_complaint
from forgekeeper.targets.git_repository import (
    RefValues,
    Repository,
    RepositoryFailed,
    open_repository,
    read_refs,
    why_ref_refused,
)

MAX_TRANSACTIONS_PER_CALL = 64
"""Maximum transactions per call: git has refused each but the last."""
ANY_VALUE = b""
"""In a transaction: delete the ref at any value.  Git verifies no value of a symbolic ref without a target."""


class RefToDelete(NamedTuple):
    """A ref to delete, and the oid that it must have.

    Without *expected_oid* it is deleted at the announced value.
    """

    ref: str
    expected_oid: str | None = None


@dataclass(frozen=True)
class RefOutcome:
    """The outcome of one ref; a locked ref still exists and may be deleted another time."""

    state: Literal["deleted", "gone", "moved", "rejected", "locked"]
    reason: str | None = None


AnnounceRefs = Callable[[Mapping[RefToDelete, str]], None]
"""Records the refs that are about to be deleted, each with its value as `Values.shown` returns it."""
FindLostRefs = Callable[[], Collection[RefToDelete]]
"""Returns rows that the caller must no longer delete; called while git holds the locks of their refs."""

REF_DELETED = RefOutcome("deleted")
REF_MISSING = RefOutcome("gone")
REF_MOVED = RefOutcome("moved", "moved")
DEFAULT_BRANCH = RefOutcome("rejected", "default_branch")
TOO_LONG_TO_LOCK = RefOutcome(
    "rejected", "too_long_to_lock"
)  # packed by a clone, which locks none; no deletion ever can
REF_LOCKED = RefOutcome("locked", "another process holds the lock of the ref")
REF_CHANGED = RefOutcome("locked", "the ref or HEAD has changed in the meantime")
ROW_CLOSED = RefOutcome("locked", "the row of the ref was closed, or excluded, in the meantime")


def delete_refs(
    root: Path,
    disk_path: str,
    doomed: Sequence[RefToDelete],
    *,
    until: float,
    grace: float = 5.0,
    announce: AnnounceRefs = lambda _values: None,
    find_lost: FindLostRefs = tuple,
) -> dict[RefToDelete, RefOutcome]:
    """Delete refs of a repository, each at its announced value; return each outcome.

    *announce* is called once, with all refs that git is about to delete, while git verifies these values and locks the
    refs.  Then *find_lost* is called, and git deletes the other refs.  So neither a push nor a pause of this process,
    however long, lets a ref be deleted at another value or after its row was closed.  A ref that has changed since the
    look stays: as moved if its row expects a value, else for the next call.

    A symbolic ref is deleted itself, never its target.  Several rows may name one ref: each is judged by its own
    expectation, and one agreeing row is enough to delete the ref.

    Git is ended at *until*, an instant of the monotonic clock, and killed *grace* seconds later.  Raises `GitError`;
    some refs may then have been deleted, and deleting them again is harmless.  Errors of *announce* and *find_lost*
    are raised; then no ref of that transaction is deleted.
    """
    require_engine("with git")
    deletion = _RefDeletion(doomed)
    if deletion.rows:
        deletion.open_git(root, disk_path, until, grace, writes=True).run_transactions(announce, find_lost)
    return deletion.outcomes


def preview_deletion(
    root: Path, disk_path: str, doomed: Sequence[RefToDelete], *, until: float, grace: float = 5.0
) -> dict[RefToDelete, RefOutcome]:
    """Return the outcomes that `delete` would have now; locks and writes nothing.

    Raises `GitError`.
    """
    deletion = _RefDeletion(doomed)
    if deletion.rows:
        deletion.open_git(root, disk_path, until, grace, writes=False).preview_outcomes()
    return deletion.outcomes


class _RefDeletion:
    """One call: the *rows* of each ref that are still open, and the *outcomes* of the others.

    `_links` has the announced values of symbolic refs; other refs are announced with the oids that git verifies.
    """

    _repository: Repository
    _git: Git

    def __init__(self, doomed: Sequence[RefToDelete]) -> None:
        self.outcomes: dict[RefToDelete, RefOutcome] = {}
        self.rows: dict[bytes, tuple[RefToDelete, ...]] = {}
        self._values = RefValues()
        self._links: dict[bytes, str] = {}
        for row in doomed:
            # Git must not see a refused name.
            if reason := why_ref_refused(row.ref):
                self.outcomes[row] = RefOutcome("rejected", reason)
            else:
                name = row.ref.encode()
                self.rows[name] = (*self.rows.get(name, ()), row)

    def open_git(self, root: Path, disk_path: str, until: float, grace: float, *, writes: bool) -> _RefDeletion:
        self._repository = open_repository(root, disk_path)
        self._git = (
            self._repository.git_for_writing(until, grace) if writes else Git(self._repository.git_dir, until, grace)
        )
        # Refs in another folder prove nothing about missing ones.
        self._repository.require_enclosed(self.rows)
        return self

    def run_transactions(self, announce: AnnounceRefs, find_lost: FindLostRefs) -> None:
        parts: list[Mapping[bytes, bytes]] = [self._settle_without_git(sorted(self.rows))]
        complaint = b""
        values, repository = self._values, self._repository
        links = [name for name, value in parts[0].items() if not value or name in values.links]
        self._links = {name: values.format_value(name, repository) for name in links}
        announce_all = partial(self._announce, parts[0], announce)
        for number in range(MAX_TRANSACTIONS_PER_CALL):
            pending = self._still_open(parts.pop())
            complaint = self._run_transaction(pending, find_lost, bool if number else announce_all)
            if complaint:
                parts += self._settle_complaint(complaint, pending)
            elif left := self._still_open(pending):
                parts.append(left)
            if not parts:
                # Missing refs may only have been on a disk out of sight: this check makes their outcome certain.
                self._repository.confirm_identity()
                return
        raise self._explain_failure(complaint)

    def _announce(self, pending: Mapping[bytes, bytes], announce: AnnounceRefs) -> None:
        values = ((name, self._links.get(name, value.decode())) for name, value in pending.items())
        announce({row: value for name, value in values for row in self.rows[name]})

    def _still_open(self, pending: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        if all(map(self.rows.__getitem__, pending)):
            return pending
        return {name: value for name, value in pending.items() if self.rows[name]}

    def preview_outcomes(self) -> None:
        """Settle all refs as a transaction would if every present lock stayed held."""
        pending = self._settle_without_git(sorted(self.rows))
        all_locked = self._repository.find_locked([b"packed-refs"])
        self._settle_refs(pending if all_locked else self._repository.find_locked(pending), REF_LOCKED)
        self._settle_refs(pending, REF_DELETED)
        self._repository.confirm_identity()

    def _settle_without_git(self, names: list[bytes]) -> dict[bytes, bytes]:
        """Settle refs that git need not see; return the others with the values to verify."""
        protected = self._protected_branches()
        self._values = read_refs(self._git, self._repository, names)
        pending = {}
        for name in names:
            value = self._values.oids.get(name)
            outcome = self._outcome_without_git(name, value, protected)
            if outcome is None and self._settle_moved(name, value):
                outcome = self._outcome_if_unlockable(name)
                if outcome is None:
                    pending[name] = value or ANY_VALUE
            if outcome is not None:
                self._settle_refs([name], outcome)
        self._values.fileless.clear()
        return pending

    def _outcome_without_git(self, name: bytes, value: bytes | None, protected: set[bytes]) -> RefOutcome | None:
        """Return the outcome of a ref that git must not delete, None of any other."""
        if name in protected:
            return DEFAULT_BRANCH
        if name in self._values.broken:
            # Git deletes no ref that it cannot read.
            return RefOutcome("locked", "git cannot read the ref: its value is broken")
        try:
            return REF_MISSING if value is None and not self._repository.has_file(name) else None
        except OSError as error:
            return RefOutcome("locked", f"cannot read the ref: {error.strerror}")

    def _settle_moved(self, name: bytes, value: bytes | None) -> bool:
        """Settle the rows that expect another value; return whether other rows are left.

        A ref without a value, such as a symbolic ref without a target, meets no expectation.
        """
        agreeing = []
        for row in self.rows[name]:
            if row.expected_oid is None or (value and row.expected_oid.lower() == value.decode()):
                agreeing.append(row)
            else:
                self.outcomes[row] = REF_MOVED
        self.rows[name] = tuple(agreeing)
        return bool(agreeing)

    def _outcome_if_unlockable(self, name: bytes) -> RefOutcome | None:
        """Return the outcome of a ref that git cannot lock, None for any other ref."""
        if not self._repository.can_lock(name):
            return TOO_LONG_TO_LOCK
        if name in self._values.fileless or not (other := self._repository.find_blocking_file(name)):
            return None
        if self.rows.get(other):
            return RefOutcome("locked", f"{other.decode()} must be deleted first")
        cure = "has a conflicting name; delete that ref, then run `forgekeeper quarantine retry`"
        return RefOutcome("rejected", f"name_conflict: {other.decode()} {cure}")

    def _protected_branches(self) -> set[bytes]:
        """Return each ref that HEAD leads to, whether it exists or not; none if HEAD is detached."""
        final = set[bytes]()
        if not self._repository.has_plain_head():
            answer = self._git.run("symbolic-ref", "--quiet", "HEAD")
            if answer.code not in (0, 1):  # 1 is a detached HEAD
                raise self._explain_failure(answer.error_output())
            final = {*answer.out.split()}
        return final | self._repository.links_from(self._git, b"HEAD")

    def _run_transaction(
        self, pending: Mapping[bytes, bytes], find_lost: FindLostRefs, meanwhile: Callable[[], object]
    ) -> bytes:
        """Delete all refs and settle them, or delete none; return git's complaint.

        Refs that must stay, as found while git holds the locks, are settled, and no ref is deleted.
        """
        if not pending:
            return b""

        def may_commit() -> bool:
            self._settle_lost(find_lost())
            self._settle_refs(self._find_changed(pending), REF_CHANGED)
            return self._still_open(pending) == pending

        self._repository.require_enclosed(pending)
        commands = (b"delete %s\0%s" % item for item in pending.items())
        answer = self._git.update_refs(commands, confirm=may_commit, meanwhile=meanwhile)
        if answer.is_committed:
            self._settle_refs(pending, REF_DELETED)
        elif self._still_open(pending) == pending:
            if answer.code < 0:
                raise self._explain_failure(answer.error_output())
            return answer.error_output()
        return b""

    def _find_changed(self, pending: Mapping[bytes, bytes]) -> set[bytes]:
        """Return the refs that have changed although git has verified all that it can.

        Git verifies the value of a symbolic ref's target, not its target.  HEAD may also lead to another branch by now.
        """
        links = sorted(self._links.keys() & pending.keys())
        values = read_refs(self._git, self._repository, links)
        changed = {name for name in links if values.format_value(name, self._repository) != self._links[name]}
        return changed | (pending.keys() & self._repository.links_from(self._git, b"HEAD"))

    def _settle_lost(self, lost: Collection[RefToDelete]) -> None:
        for row in lost:
            if row in (rows := [*self.rows.get(row.ref.encode(), ())]):
                self.outcomes[row] = ROW_CLOSED
                rows.remove(row)
                self.rows[row.ref.encode()] = tuple(rows)

    def _settle_complaint(self, message: bytes, pending: Mapping[bytes, bytes]) -> list[Mapping[bytes, bytes]]:
        """Settle the ref of git's complaint; return the refs to retry.

        They are halved if the ref is not clear.
        """
        complaint = parse_complaint(message, self._repository.git_dir)
        if complaint.lock is not None:
            self._leave_locked(complaint.lock, pending)
        elif complaint.general:
            raise self._explain_failure(message)
        elif complaint.ref is not None and complaint.ref in pending:
            # A changed ref is looked at again; rows that stay open after that wait for the next call.
            left = self._settle_without_git([complaint.ref]) if complaint.changed else pending
            self._settle_refs(
                left.keys() & {complaint.ref},
                REF_CHANGED if complaint.changed else RefOutcome("locked", complaint.text),
            )
        elif len(pending) == 1:
            self._settle_refs(pending, RefOutcome("locked", complaint.text))
        else:
            names = list(pending)
            half = len(names) // 2
            return [{name: pending[name] for name in part} for part in (names[half:], names[:half])]
        left = self._still_open(pending)
        return [left] if left else []

    def _leave_locked(self, lock: bytes, pending: Mapping[bytes, bytes]) -> None:
        name = lock.removesuffix(b".lock")
        if name not in pending:
            path = os.fsdecode(lock)
            age = self._repository.read_file_age(path)
            raise RepositoryFailed(f"the lock {path} exists" + ("" if age is None else f", {age} old"))
        # A killed git may have left thousands of locks.
        self._settle_refs({name, *self._repository.find_locked(pending)}, REF_LOCKED)

    def _settle_refs(self, names: Iterable[bytes], outcome: RefOutcome) -> None:
        for name in names:
            for row in self.rows[name]:
                self.outcomes[row] = outcome
            self.rows[name] = ()

    def _explain_failure(self, complaint: bytes) -> RepositoryFailed:
        """Return git's complaint as an error, or raise another if root or repository are missing."""
        self._repository.confirm_identity()
        return RepositoryFailed(clean_first_line(complaint))

"""The work that the children of a message share: their guard, leases and session, and reads that serve all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from forgekeeper.api.answers import KeyedArguments
from forgekeeper.api.batches import ChildSpec
from forgekeeper.guards.run_guard import RunGuard
from forgekeeper.ledger import quarantine
from forgekeeper.platform.connections import client, process_identity
from forgekeeper.platform.coordination.leases import Lease, LeaseTaken, hold_leases
from forgekeeper.platform.database import database
from forgekeeper.platform.database.sessions import read_only_session
from forgekeeper.platform.settings import Settings

MAX_MESSAGE_TIME = timedelta(seconds=30)
"""Time for which a message begins children; children that are left then get messages of their own.

With it, the last child ends before the time limit of the message, which is a minute longer than a child's budget.
"""
Read = TypeVar("Read")


class SharedWork:
    """The work of a message with one or more children of a declaration, which one thread executes in turn.

    The first child that needs a lease takes the leases of all; the first that needs a read reads for all.  So a read of
    rows is made while no other process works on any of the children.  *run* is the run that sent the message.
    """

    def __init__(
        self,
        child: ChildSpec,
        settings: Settings,
        calls: Sequence[KeyedArguments],
        run: int | None,
        *,
        may_have_failed: bool,
    ) -> None:
        self.guard = RunGuard(child, settings, child.outcome(), run)
        self.ids: list[Any] = [arguments[0] for _key, arguments in calls if arguments]
        self._child, self._settings, self._may_have_failed = child, settings, may_have_failed
        self._stack = ExitStack()
        self._leased_at: float | None = None
        self._read: dict[str, Any] = {}
        self._succeeded: list[str] = []

    def read_once(self, name: str, read: Callable[[], Read]) -> Read:
        """Return the answer of *read*, which is called for the first child that asks for *name*."""
        if name not in self._read:
            self._read[name] = read()
        found: Read = self._read[name]
        return found

    def budget_left(self) -> timedelta:
        """Return the budget of the next child; it ends before the leases, which last for the budget of one child."""
        used = 0.0 if self._leased_at is None else time.monotonic() - self._leased_at
        return max(timedelta(0), self._child.budget - timedelta(seconds=used))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Let PostgreSQL refuse writes of the batch, from the first child to the end of the last."""
        batch = self._child.batch.name
        self.read_once("session", lambda: self._stack.enter_context(read_only_session(batch)))
        with read_only_session(batch):
            yield

    def find_lease(self, one: Any) -> Lease:
        """Return the lease of the child whose first id is *one*; raise `LeaseTaken` if another process has it."""
        leases = self.read_once("leases", self._take_leases)
        if (name := self._name_lease(one)) not in leases:
            raise LeaseTaken(f"another process holds the lease {name}")
        return leases[name]

    def note_success(self, key: str) -> None:
        """Note that the child with this key has succeeded: `end` forgets its earlier failures."""
        self._succeeded.append(key)

    def end(self) -> None:
        """Release leases and session, count deletions without limits, forget failures of children that succeeded."""
        self._stack.close()
        self.guard.count_unreserved()
        if self._succeeded and self._may_have_failed:
            quarantine.forget_failures(self._child.batch.name, self._child.name, self._succeeded)

    def _take_leases(self) -> Mapping[str, Lease]:
        self._leased_at = time.monotonic()
        held = hold_leases(
            client,
            [self._name_lease(one) for one in self.ids],
            ttl=self._settings.dead_after,
            max_duration=self._child.budget,
            holder=process_identity(),
            is_forbidden=database.in_transaction,
        )
        return self._stack.enter_context(held)

    def _name_lease(self, one: Any) -> str:
        return f"{self._child.name}:{one}"

"""An attempt at a message of children: at each of its children in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from forgekeeper.api.answers import KeyedArguments
from forgekeeper.api.batches import ChildSpec
from forgekeeper.engine.attempt import Attempt, Runner, write_or_log
from forgekeeper.engine.shared_work import MAX_MESSAGE_TIME, SharedWork
from forgekeeper.platform import shutdown
from forgekeeper.platform.database import is_connected

log = structlog.get_logger(__name__)


class MessageAttempt:
    """An attempt at a message with the children *calls*, sent by the run *run_number*.

    Each child has an attempt of its own, with a lease, a result, log lines, quarantine and audit: a child that fails
    stops no other.  Children that end with work left, and children that have not begun within `MAX_MESSAGE_TIME`, are
    in *successors* at the end.  If the batch is stopped, the worker shuts down or PostgreSQL is lost, the children that
    have not begun wait for the next run.  If one *may_have_failed* before, the end forgets failures of children that
    have succeeded.  *message_id* is the key of the child at work, *ended* are the attempts that have ended.
    """

    def __init__(
        self,
        runner: Runner,
        child: ChildSpec,
        calls: Sequence[KeyedArguments],
        run_number: int | None,
        *,
        may_have_failed: bool = True,
    ) -> None:
        self.message_id = calls[0][0]
        self.run_number = run_number
        self.successors: list[KeyedArguments] = []
        self.ended: list[Attempt] = []
        self._runner, self._child, self._calls = runner, child, list(calls)
        self._shared = SharedWork(child, runner.settings, calls, run_number, may_have_failed=may_have_failed)
        self._ends = time.monotonic() + MAX_MESSAGE_TIME.total_seconds()
        self._attempt: Attempt | None = None

    def work_if_allowed(self, *_arguments: object) -> None:
        """Do the work of each child, until a reason ends all."""
        self._work_on_next()
        while self._calls and not self._is_ended():
            if time.monotonic() > self._ends:
                self.successors += self._calls
                return
            self._work_on_next()
        if self._calls:
            log.info("children wait for the next run", child=self._child.name, children=len(self._calls))

    def _work_on_next(self) -> None:
        self.message_id, arguments = self._calls.pop(0)
        create = self._runner.create_child_attempt
        self._attempt = create(self._child, self.message_id, self._shared, run=self.run_number)
        with self._attempt:
            self._attempt.work_if_allowed(*arguments)
        self.ended.append(self._attempt)
        if self._attempt.wants_successor:
            self.successors.append((self.message_id, arguments))
        self._attempt = None

    def _is_ended(self) -> bool:
        """Return whether the next child would end as the last child has."""
        return self._shared.guard.stop_reason is not None or shutdown.requested.is_set() or not is_connected()

    def close(self, error: BaseException | None) -> None:
        """End the attempt at the child that an *error* has interrupted, and the shared work; needs a connection."""
        try:
            if self._attempt is not None:
                self._attempt.close(error)
        finally:
            self.end()

    def end(self) -> None:
        """End the shared work: release the leases, count deletions, forget failures."""
        write_or_log("end of children not written", self._shared.end)


def execute_message(
    runner: Runner, child: ChildSpec, calls: Sequence[KeyedArguments], run_number: int | None
) -> MessageAttempt:
    """Execute the children *calls* in this thread, without a message in Redis; return the ended attempt.

    An exception that ends the process leaves the child at work without a result.
    """
    attempt = MessageAttempt(runner, child, calls, run_number)
    try:
        attempt.work_if_allowed()
    finally:
        attempt.end()
    return attempt

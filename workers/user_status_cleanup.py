"""Delete user statuses whose time has passed (batch 48).

Runs every minute.  It deletes a hundred rows at a time until none is left or half a
minute has gone by; what remains, and what others hold locked, waits for the next minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

from models import UserStatus
from forgekeeper.database import now
from models.user_status import START, Position
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.deadline import Deadline
from forgekeeper.declaring import batch
from forgekeeper.failpoints import failpoint

BATCH_SIZE = 100
MAX_RUNTIME = timedelta(seconds=30)


@dataclass
class Outcome:
    """What a run comes to; it grows with each transaction."""

    deleted: int = 0
    batches: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(document=48, outcome=Outcome)
def user_status_cleanup(attempt: Attempt) -> None:
    """Run the batch for the message's row."""
    run(attempt.outcome, attempt.deadline(MAX_RUNTIME))


def run(outcome: Outcome, deadline: Deadline) -> None:
    """Delete what is due, oldest first, in transactions of `BATCH_SIZE` rows."""
    due, position, key = now(), START, UserStatus.key()
    with BadRecords(user_status_cleanup.actor_name, "user_status", deadline, partial(UserStatus.still_due, due)) as bad:
        while True:
            before = outcome.deleted
            reached = bad.chunk(
                partial(
                    _delete, outcome, partial(UserStatus.delete_due, due, position, limit=BATCH_SIZE, key=key), bad
                ),
                partial(UserStatus.next_due, due, position, limit=BATCH_SIZE, without=bad.keys),
            )
            if reached is None:
                return
            position = reached
            failpoint("user_status_cleanup.deleted")
            if deadline.passed(outcome.deleted - before):
                outcome.stopped = "deadline"
                return


def _delete(
    outcome: Outcome,
    delete: Callable[..., tuple[int, Position | None]],
    bad: BadRecords,
    only: Sequence[int] | None,
) -> Position | None:
    count, reached = delete(only=only, without=bad.keys)
    outcome.deleted += count
    outcome.batches += count > 0
    return reached

"""Delete user statuses whose time has passed (batch 48).

Runs every minute.  It deletes a hundred rows at a time until none is left or half a
minute has gone by; what remains, and what others hold locked, waits for the next minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from models import UserStatus, now
from models.user_status import START
from workers.attempt import Attempt
from workers.deadline import Deadline
from workers.declaring import batch
from workers.failpoints import failpoint

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
    while True:
        count, position = UserStatus.delete_due(due, position, limit=BATCH_SIZE, key=key)
        if count == 0:
            return
        outcome.deleted += count
        outcome.batches += 1
        failpoint("user_status_cleanup.deleted")
        if deadline.passed(count):
            outcome.stopped = "deadline"
            return

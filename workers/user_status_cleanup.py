"""Delete user statuses whose time has passed (batch 48).

Runs every minute.  It deletes a hundred rows at a time until none is left or half a
minute has gone by; what remains, and what others hold locked, waits for the next minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import dramatiq

from models import UserStatus, now
from models.user_status import START
from workers.attempt import current
from workers.broker import broker
from workers.deadline import Deadline
from workers.failpoints import failpoint

BATCH_SIZE = 100
MAX_RUNTIME = timedelta(seconds=30)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    deleted: int = 0
    batches: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@dramatiq.actor(broker=broker, queue_name="cron", document=48, time_limit=120_000)
def user_status_cleanup() -> None:
    """Run the batch for the message's row."""
    attempt = current()
    attempt.outcome = run(attempt.deadline(MAX_RUNTIME))


def run(deadline: Deadline) -> Outcome:
    """Delete what is due, oldest first, in transactions of `BATCH_SIZE` rows."""
    due, position, deleted, batches = now(), START, 0, 0
    while True:
        count, position = UserStatus.delete_due(due, position, limit=BATCH_SIZE)
        failpoint("user_status_cleanup.deleted")
        if count == 0:
            return Outcome(deleted, batches, "drained")
        deleted, batches = deleted + count, batches + 1
        if deadline.passed(count):
            return Outcome(deleted, batches, "deadline")

"""Delete user statuses whose time has passed (batch 48).

Runs every minute.  It deletes a hundred rows at a time until none is left or half a
minute has gone by; what remains, and what others hold locked, waits for the next minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from forgekeeper.batches import Record, Threshold, batch
from forgekeeper.database import backlog
from forgekeeper.database.backlog import Backlog
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.run import Run
from models import UserStatus
from models.user_status import START, Position

BATCH_SIZE = 100
MAX_RUNTIME = timedelta(seconds=30)


@dataclass
class Outcome:
    """What a run comes to; it grows with each transaction."""

    deleted: int = 0
    batches: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(
    document=48,
    cron="* * * * *",
    cron_sentence="When expired user statuses are deleted.",
    pace_sentence="Statuses deleted per second at most; unset: no limit.",
    budget=MAX_RUNTIME,
    time_limit=timedelta(seconds=90),
    team="system-admins",
    outcome=Outcome,
    tables=[UserStatus],
    records=[
        Record(
            "user_status",
            examined=("deleted",),
            processed=("deleted",),
            errors={"database": ()},
            objective=timedelta(minutes=5),
        )
    ],
    thresholds=[Threshold("duration", above=60), Threshold("backlog", above=10_000)],
    steps=["deleted"],
)
def user_status_cleanup(run: Run[Outcome]) -> None:
    """Delete user statuses whose time has passed."""
    outcome, position, key = run.outcome, START, UserStatus.key()
    with run.bad_records("user_status", partial(UserStatus.still_due, run.now)) as bad:
        while True:
            before = outcome.deleted
            reached = bad.chunk(
                partial(
                    _delete, outcome, partial(UserStatus.delete_due, run.now, position, limit=BATCH_SIZE, key=key), bad
                ),
                partial(UserStatus.next_due, run.now, position, limit=BATCH_SIZE, without=bad.keys),
            )
            if reached is None:
                return
            position = reached
            run.step("deleted")
            if run.deadline.passed(outcome.deleted - before):
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


@user_status_cleanup.backlog("user_status")
def due(now: datetime) -> Backlog:
    """Count the statuses whose time has come."""
    return backlog.user_statuses(now)

"""Delete user statuses whose time has passed (batch 48).

Runs every minute.  It deletes a hundred rows at a time until none is left or half a minute is over.  Remaining rows,
and rows that others have locked, wait for the next minute.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from forgekeeper import Rows, Subject, Threshold, batch
from models import UserStatus

BATCH_SIZE = 100
MAX_RUNTIME = timedelta(seconds=30)


@batch(
    document=48,
    cron="* * * * *",
    budget=MAX_RUNTIME,
    team="system-admins",
    thresholds=[Threshold("duration", above=60), Threshold("backlog", above=10_000)],
    collector="user_statuses",
)
def user_status_cleanup(now: datetime) -> Rows[UserStatus]:
    """Delete user statuses whose time has passed."""
    return Rows(
        UserStatus,
        UserStatus.clear_status_at <= now,
        since=UserStatus.clear_status_at,
        chunk=BATCH_SIZE,
        objective=timedelta(minutes=5),
        called=Subject(
            *("status", "USER", "user_status"),
            because="it had expired at {due}",
            gone="of that user was deleted",
            is_there=lambda user: UserStatus.select().where(UserStatus.user_id == user).exists(),
        ),
    )

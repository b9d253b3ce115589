"""Read cron expressions as crontab(5) does, in UTC: five fields, or six with the seconds first, or ``off``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import islice, pairwise

from apscheduler.triggers.base import BaseTrigger
from cronsim import CronSim, CronSimError

EPOCH = datetime(2024, 1, 1, tzinfo=UTC)
"""Where a schedule is looked at: a leap year that begins on a Monday."""
MICROSECOND = timedelta(microseconds=1)


class BadCron(ValueError):
    """The expression is not a schedule that can be kept."""


class Cron(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A schedule: the times at which a batch is due; APScheduler takes it for a trigger."""

    def __init__(self, expression: str) -> None:
        """Take five or six fields; raise `BadCron` with a sentence that says what is wrong."""
        self.expression = " ".join(expression.split())
        # A question mark is a star elsewhere, and CronSim knows Sunday at the end of a range by its number alone.
        self._fields = self.expression.lower().replace("?", "*").replace("-sun", "-7")
        fields = self._fields.split()
        if len(fields) not in (5, 6):
            raise BadCron(
                f"{self.expression!r} has {len(fields)} fields; a schedule has five "
                "(minute hour day month weekday), or six with the second first, or is 'off'"
            )
        if fields[-3] != "*" and fields[-1] != "*":
            raise BadCron(
                f"{self.expression!r} restricts both the day of the month and the day of the week; "
                "crontab joins them with 'or' and others with 'and': leave one of them '*'"
            )
        self._every_day = fields[-3:] == ["*", "*", "*"]
        try:
            self.after(EPOCH)
        except (CronSimError, ValueError) as error:
            raise BadCron(f"{self.expression!r} is not a cron expression: {error}") from None

    def __str__(self) -> str:
        return self.expression

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cron) and other.expression == self.expression

    def __hash__(self) -> int:
        return hash(self.expression)

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """Return the first time that is later than the previous one, and not before *now* where there was none."""
        return self.after(previous_fire_time or now - MICROSECOND)

    def after(self, instant: datetime) -> datetime:
        """Return the first time later than *instant*."""
        return next(CronSim(self._fields, instant))

    def newest(self, until: datetime) -> datetime:
        """Return the last time that is not later than *until*."""
        return next(CronSim(self._fields, until + MICROSECOND, reverse=True))

    @cached_property
    def period(self) -> timedelta:
        """The longest gap between two neighbouring times."""
        # Gaps repeat within a day, and from day to day only where days are restricted: a hundred neighbours and the
        # nights of a year show the longest.
        gaps = [later - sooner for sooner, later in pairwise(islice(CronSim(self._fields, EPOCH), 101))]
        for night in range(1 if self._every_day else 366):
            midnight = EPOCH + timedelta(days=night + 1) - MICROSECOND
            gaps.append(self.after(midnight) - self.newest(midnight))
        return max(gaps)


def parse(text: str) -> Cron | None:
    """Return the schedule that *text* names, None for ``off``; raise `BadCron`."""
    return None if text.strip().lower() == "off" else Cron(text)

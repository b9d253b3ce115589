"""Schedules of batches: cron expressions as in crontab(5), in UTC, with five fields, six with seconds, or ``off``.

They parse the schedule that a batch declares (`cron=`), and its override by the setting ``FORGEKEEPER_CRON_<BATCH>``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import islice, pairwise

from apscheduler.triggers.base import BaseTrigger
from cronsim import CronSim, CronSimError

EXAMINED_YEAR_START = datetime(2024, 1, 1, tzinfo=UTC)
"""Start of the year in which a schedule is examined: a leap year that begins on a Monday."""
ONE_MICROSECOND = timedelta(microseconds=1)


class BadCron(ValueError):
    """The expression is not a valid schedule."""


class Cron(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A schedule: the due times of a batch, as a trigger of APScheduler."""

    def __init__(self, expression: str) -> None:
        """Parse five or six fields; raise `BadCron` with a sentence that names the error."""
        self.expression = " ".join(expression.split())
        # Other cron dialects write a question mark for a star.  CronSim accepts Sunday at the end of a range only as 7.
        self._fields = self.expression.lower().replace("?", "*").replace("-sun", "-7")
        fields = self._fields.split()
        if len(fields) not in (5, 6):
            raise BadCron(
                f"{self.expression!r} has {len(fields)} fields; a schedule has five "
                "(minute hour day month weekday), six with seconds first, or is 'off'"
            )
        if fields[-3] != "*" and fields[-1] != "*":
            raise BadCron(
                f"{self.expression!r} restricts both the day of the month and the day of the week; "
                "programs disagree whether one or both must match: set one of them to '*'"
            )
        self._every_day = fields[-3:] == ["*", "*", "*"]
        try:
            self.next_after(EXAMINED_YEAR_START)
        except (CronSimError, ValueError) as error:
            raise BadCron(f"{self.expression!r} is not a cron expression: {error}") from None

    def __str__(self) -> str:
        return self.expression

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cron) and other.expression == self.expression

    def __hash__(self) -> int:
        return hash(self.expression)

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """Return the first time after the previous time, or without one the first from *now* on."""
        return self.next_after(previous_fire_time or now - ONE_MICROSECOND)

    def next_after(self, instant: datetime) -> datetime:
        """Return the first time later than *instant*."""
        return next(CronSim(self._fields, instant))

    def latest_until(self, until: datetime) -> datetime:
        """Return the last time that is not later than *until*."""
        return next(CronSim(self._fields, until + ONE_MICROSECOND, reverse=True))

    @cached_property
    def longest_interval(self) -> timedelta:
        """The longest gap between two neighbouring times."""
        # Every active minute has the same seconds, every active hour the same minutes, every active day the same hours.
        first = self.next_after(EXAMINED_YEAR_START - ONE_MICROSECOND)
        hour, day = first.replace(minute=0, second=0), first.replace(hour=0, minute=0, second=0)
        ends = [hour + timedelta(minutes=number) for number in range(1, 61)]
        ends += [day + timedelta(hours=number) for number in range(1, 25)]
        ends += [EXAMINED_YEAR_START + timedelta(days=number) for number in range(1, 2 if self._every_day else 367)]
        within = [later - sooner for sooner, later in pairwise(islice(CronSim(self._fields, EXAMINED_YEAR_START), 61))]
        return max(
            *within,
            *(self.next_after(end - ONE_MICROSECOND) - self.latest_until(end - ONE_MICROSECOND) for end in ends),
        )


def parse_schedule(text: str) -> Cron | None:
    """Parse a schedule; return None for ``off``, raise `BadCron` if it is malformed."""
    return None if text.strip().lower() == "off" else Cron(text)

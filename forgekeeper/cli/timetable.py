"""When batches are due: by what the living schedulers keep, as a shell's settings may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from forgekeeper.runs.processes import Process
from forgekeeper.settings import Settings
from forgekeeper.settings.cron import BadCron, Cron, parse


@dataclass(frozen=True)
class Timetable:
    """What each living scheduler keeps; where none lives, what one would keep by these settings."""

    kept: Sequence[dict[str, str]]
    settings: Settings

    @classmethod
    def of(cls, known: Sequence[Process], instant: datetime, settings: Settings) -> Timetable:
        """Take the timetables of the living schedulers among the *known* processes."""
        return cls([one.timetable for one in known if one.timetable and not one.is_silent(instant)], settings)

    @property
    def source(self) -> Literal["schedulers", "settings"]:
        """Say where it comes from."""
        return "schedulers" if self.kept else "settings"

    def next(self, batch: str, instant: datetime) -> tuple[str, datetime | None]:
        """Return the schedule by which the batch is due next, and when."""
        crons = [(schedule, _cron(schedule)) for schedule in self._schedules(batch)]
        due = [(schedule, cron.after(instant) if cron else None) for schedule, cron in crons]
        return min(due, key=lambda one: (one[1] is None, one[1]))

    def cron(self, batch: str, tick: datetime) -> Cron | None:
        """Return the schedule by which the batch is due at *tick*, else any that it has."""
        crons = [cron for cron in map(_cron, self._schedules(batch)) if cron]
        return next((cron for cron in crons if cron.newest(tick) == tick), crons[0] if crons else None)

    def _schedules(self, batch: str) -> list[str]:
        """Return the batch's schedules: one, unless schedulers disagree."""
        if not self.kept:
            return [str(self.settings.cron(batch) or "off")]
        return sorted({timetable.get(batch, "off") for timetable in self.kept})


def _cron(schedule: str) -> Cron | None:
    try:
        return parse(schedule)
    except BadCron:  # of a scheduler whose version knows more
        return None

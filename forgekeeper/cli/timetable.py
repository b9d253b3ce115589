"""When batches are due: by what the living schedulers keep, as a shell's settings may differ."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from forgekeeper.runs.processes import Process
from forgekeeper.settings import Settings
from forgekeeper.settings.cron import BadCron, Cron, parse


class Timetable(NamedTuple):
    """What a living scheduler keeps, None where none lives; then it is what one would keep by these settings."""

    kept: dict[str, str] | None
    settings: Settings

    @classmethod
    def of(cls, known: Sequence[Process], instant: datetime, settings: Settings) -> Timetable:
        """Take the timetable of the first living scheduler; where they disagree `process_list.warnings` says so."""
        kept = (one.timetable for one in known if one.timetable and not one.is_silent(instant))
        return cls(next(kept, None), settings)

    def schedule(self, batch: str) -> str:
        """Return the batch's schedule as it is written."""
        return str(self.settings.cron(batch) or "off") if self.kept is None else self.kept.get(batch, "off")

    def cron(self, batch: str) -> Cron | None:
        """Return the batch's schedule, None where it is off or that of a scheduler whose version knows more."""
        try:
            return parse(self.schedule(batch))
        except BadCron:
            return None

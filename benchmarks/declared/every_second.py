"""A batch that is due every second and records its start: for `FORGEKEEPER_BATCHES`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from forgekeeper import Note, batch


@dataclass
class Outcome:
    """Start of the run by this machine's clock."""

    began: float = 0.0
    stopped: str = "drained"


@batch(
    cron="* * * * * *",
    budget=timedelta(seconds=10),
    time_limit=timedelta(seconds=30),
    outcome=Outcome,
    records=[],
)
def every_second(_now: datetime) -> Note:
    """Record the time."""
    return Note(began=time.time())

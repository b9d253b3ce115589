"""Delete pipelines that nothing has touched for a year: a batch from outside the project.

Runs every ten minutes, a hundred rows at a time, for at most a minute; what remains waits for the next run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from forgekeeper.batches import Record, batch
from forgekeeper.database import database
from forgekeeper.database.backlog import BOUND, Backlog
from forgekeeper.database.survey import Rows
from forgekeeper.preview import Look, Part
from forgekeeper.runs.run import Run

KEEP = timedelta(days=365)
BATCH_SIZE = 100
MAX_RUNTIME = timedelta(minutes=1)

DUE = "updated_at < %(horizon)s"
"""What goes; what `run --dry-run` counts, too."""

# `= any(array(...))` is computed once; `in (select ... limit n)` may be repeated, and then deletes more.
DELETE_STALE = f"""
    delete from pipelines
    where id = any(array(
        select id from pipelines where {DUE}
        order by updated_at, id limit %(limit)s for update skip locked
    )) and {DUE}
"""
STALE = f"""
    select count(*), min(updated_at) from (
        select updated_at from pipelines where {DUE} limit %(bound)s
    ) as stale
"""


@dataclass
class Outcome:
    """What a run comes to; it grows with each chunk."""

    deleted: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(
    cron="*/10 * * * *",
    cron_sentence="When stale pipelines are deleted.",
    pace_sentence="Pipelines deleted per second at most; unset: no limit.",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=2),
    outcome=Outcome,
    records=[Record("pipeline", examined=("deleted",), processed=("deleted",), objective=timedelta(hours=1))],
    steps=["deleted"],
)
def stale_pipelines(run: Run[Outcome]) -> None:
    """Delete pipelines that nothing has touched for a year."""
    values = {"horizon": run.now - KEEP, "limit": BATCH_SIZE}
    while count := database.execute_sql(DELETE_STALE, values).rowcount:
        run.outcome.deleted += count
        run.step("deleted")
        if run.deadline.passed(count):
            run.outcome.stopped = "deadline"
            return


@stale_pipelines.backlog("pipeline")
def stale(now: datetime) -> Backlog:
    """Count the stale pipelines, and say since when the oldest is."""
    count, oldest = database.execute_sql(STALE, {"horizon": now - KEEP, "bound": BOUND}).fetchone()
    return Backlog(count, oldest and oldest + KEEP)


@stale_pipelines.preview
def foreseen(look: Look) -> Iterator[Part]:
    """Count what a run would delete, by the condition that it goes by."""
    due = Rows("pipelines", DUE, {"horizon": look.now - KEEP}, due="updated_at")
    yield look.count(look.part("pipeline"), due, after=KEEP)

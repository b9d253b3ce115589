"""The page *Undo*: the last runs with deletions, and how many records can be restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from forgekeeper.api.answers import Subject
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.cli.audit import fill_template, list_subjects
from forgekeeper.cli.console.pages import PageRequest, page
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.ledger.limits import NO_AMOUNT, RunTotal
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject

LOOKBACK_DAYS, MAX_RUNS = 14, 5
"""Maximum age of listed runs in days, and maximum runs per kind of record."""
MAX_COUNTED_OBJECTS = 10_000
"""Maximum objects in the outbox that are counted."""
COUNTING_SECONDS = 0.2
"""Time limit for the records of a run.

PostgreSQL ends a session of the console that is idle in a transaction for 2 s.
"""


@page("/undo", "undo.html", TranslatableText("Undo"), timeout_seconds=12, live=False)
def show_undo(request: PageRequest) -> dict[str, Any]:
    """Show how to undo deletions of each kind of record, and how many records can be restored."""
    instant, kinds = now(), [one for one in list_subjects() if one.undone and one.batch and one.record]
    undone = {one.batch for one in kinds}
    return {
        "at": instant,
        "days": LOOKBACK_DAYS,
        "limit": MAX_COUNTED_OBJECTS,
        "outbox": DeletedObject.count_recoverable(MAX_COUNTED_OBJECTS + 1),
        "grace": request.settings.object_grace,
        "kinds": [
            (one, one.obstacle and one.obstacle(), [*_list_runs(one, request.settings, instant)]) for one in kinds
        ],
        "lost": [name for name, batch in BATCHES.items() if batch.deletes_records and name not in undone],
    }


def _list_runs(kind: Subject, settings: Settings, instant: datetime) -> Iterator[dict[str, Any]]:
    """Yield the last runs that deleted such records; *until* is None if nothing limits it."""
    batch, record = str(kind.batch), str(kind.record)
    runs = lookup.list_last_runs(batch, record, instant - timedelta(days=LOOKBACK_DAYS), limit=MAX_RUNS)
    totals = RunTotal.sum_of_runs(batch, [run for run, _ in runs])
    for run, deleted_at in runs:
        back = kind.count_recoverable and kind.count_recoverable(run, time.monotonic() + COUNTING_SECONDS, settings)
        yield {
            "run": run,
            "at": deleted_at,
            "deleted": totals.get(run, NO_AMOUNT).records,
            "back": back,
            "until": deleted_at + getattr(settings, kind.kept) if kind.kept else None,
            "command": fill_template(kind.restore_run, {"run": run})
            if kind.restore_run and back and back.recoverable
            else "",
        }

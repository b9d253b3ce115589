"""Deletions of each batch today, compared with earlier days, for `status` and the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.guards import breaker
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.totals import RunTotal

DAYS, TIMES = 14, 2
"""An amount is unusual if it exceeds TIMES times the largest amount of the last DAYS days."""

Amounts = dict[str, dict[str, Any]]


def amounts(instant: datetime, *, least: int) -> Amounts:
    """Return the deletions of each deleting batch *today* (UTC) and on the days *before*.

    The days are ordered newest first. An *unusual* amount also exceeds *least* records. *released* describes the
    release of a held run and its remaining records, None for all.
    """
    today, found = instant.astimezone(UTC).date(), Amounts()
    by_day = RunTotal.by_day(today, DAYS + 1)
    for row in Batch.select().order_by(Batch.name):
        if row.name in BATCHES and BATCHES[row.name].deletes:
            # Days before the batch was registered are not counted as days without deletions.
            there = (today - row.registered_at.astimezone(UTC).date()).days
            now, before = by_day[row.name][0], by_day[row.name][1 : there + 1]
            found[row.name] = {
                "today": now,
                "before": before,
                "usual": round(median(before)) if before else None,
                "unusual": bool(before) and now > max(least, TIMES * max(before)),
                "released": _released(row),
            }
    return found


def _released(row: Batch) -> dict[str, Any] | None:
    if row.released_at is None or not breaker.released(row.name):
        return None
    left = RunTotal.used(row.name, breaker.NEXT).released
    return {"by": row.released_by, "at": row.released_at, "reason": row.released_reason, "left": left}


def warnings(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each batch that has deleted an unusual amount today."""
    for name, one in found.items():
        if one["unusual"]:
            most = f"the most of the {len(one['before'])} days before was {max(one['before']):,}"
            stop = f"`forgekeeper stop {name} --reason ...` stops it"
            yield f"{name} has deleted {one['today']:,} records today (UTC), {most}: {stop}"

"""Deletions of each batch today, compared with earlier days, for `status` and the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.guards import breaker
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.limits import RunTotal

COMPARED_DAYS, UNUSUAL_FACTOR = 14, 2
"""An amount is unusual if it exceeds TIMES times the largest amount of the last DAYS days."""

DailyAmounts = dict[str, dict[str, Any]]


def compare_daily_amounts(instant: datetime, *, least: int) -> DailyAmounts:
    """Return the deletions of each deleting batch *today* (UTC) and on the days *before*.

    The days are ordered newest first. An *unusual* amount also exceeds *least* records. *released* describes the
    release of a held run and its remaining records, None for all.
    """
    today, found = instant.astimezone(UTC).date(), DailyAmounts()
    by_day = RunTotal.sum_by_day(today, COMPARED_DAYS + 1)
    for row in Batch.select().order_by(Batch.name):
        if row.name in BATCHES and BATCHES[row.name].deletes_records:
            # Days before the batch was registered are not counted as days without deletions.
            there = (today - row.registered_at.astimezone(UTC).date()).days
            now, before = by_day[row.name][0], by_day[row.name][1 : there + 1]
            found[row.name] = {
                "today": now,
                "before": before,
                "usual": round(median(before)) if before else None,
                "unusual": bool(before) and now > max(least, UNUSUAL_FACTOR * max(before)),
                "released": _describe_release(row),
            }
    return found


def _describe_release(row: Batch) -> dict[str, Any] | None:
    if row.released_at is None or not breaker.is_released(row.name):
        return None
    left = RunTotal.read_usage(row.name, breaker.NEXT_RUN).released
    return {"by": row.released_by, "at": row.released_at, "reason": row.released_reason, "left": left}


def warn_of_unusual(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each batch that has deleted an unusual amount today."""
    for name, one in found.items():
        if one["unusual"]:
            most = f"the maximum of the {len(one['before'])} days before is {max(one['before']):,}"
            stop = f"`forgekeeper stop {name} --reason ...` stops it"
            yield f"{name} has deleted {one['today']:,} records today (UTC), {most}: {stop}"

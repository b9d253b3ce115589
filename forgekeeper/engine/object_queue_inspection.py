"""Read-only views of a queue of objects: backlog, share for the circuit breaker, quarantine, preview, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import peewee as pw

from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import find_batch_name
from forgekeeper.api.inspection import (
    BUSY_REASON,
    PASSED_OVER_REASON,
    PreviewContext,
    PreviewPart,
    RefusedRecords,
    parse_ids,
)
from forgekeeper.api.objects import Objects
from forgekeeper.engine.queue_source import find_referenced_items
from forgekeeper.engine.target import KeptItem
from forgekeeper.platform.database import exclusions, queries
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.queries import START_POSITION, AffectedShare, filter_keys, list_positions
from forgekeeper.platform.database.survey import estimate_rows, locked_condition, rows_of_query
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.queue import QueueItem, QueueTable
from forgekeeper.targets.objects import is_below, is_normal


def sample_object_paths(objects: Objects[Any], location: str) -> list[str]:
    """Return the paths of some objects at the location: kept by rows of other tables, or to be deleted."""
    sample = None if objects.unless is None else getattr(objects.unless.owner, "sample", None)
    named = [] if sample is None else sample(location)
    return [*named, *QueueTable(objects, "").sample_paths(location)]


def count_pending_objects(objects: Objects[Any], batch: str, now: datetime) -> Backlog:
    """Count the objects to delete."""
    due_at = objects.queue.due_at
    return Backlog.from_query(QueueTable(objects, batch).select_not_excluded(now).order_by(due_at), oldest=due_at)


def measure_affected_objects(objects: Objects[Any], batch: str, now: datetime) -> AffectedShare:
    """Return the counts for the circuit breaker: objects to delete, of all known objects.

    These are the objects to delete and the objects that other rows name.
    """
    owners = () if objects.unless is None else (objects.unless.owner,)
    return AffectedShare.from_queries(QueueTable(objects, batch).select_not_excluded(now), further_models=owners)


def define_object_quarantine(objects: Objects[Any], batch: str) -> RefusedRecords:
    """Return the quarantine of the queue: the objects that were given up."""
    table = QueueTable(objects, batch)
    return RefusedRecords(
        kind=objects.called,
        record=f"dead_{objects.called}",
        count=lambda: queries.count_bounded(table.select_given_up()),
        entries=lambda _settings, limit: table.list_entries(limit),
        retry=lambda keys: table.retry(parse_ids(keys)),
        discard=lambda keys: table.discard(parse_ids(keys)),
    )


def preview_objects(objects: Objects[Any], look: PreviewContext) -> Iterator[PreviewPart]:
    """Count the objects that would be deleted, by the queue alone: the stores are not asked."""
    table, due_at = QueueTable(objects, find_batch_name(look.batch)), objects.queue.due_at
    part, bad, position = look.begin_part(objects.record), look.passed_over(objects.record), START_POSITION
    query = table.select_not_excluded(look.now)
    due = rows_of_query(query, due_at)
    part.add_kept(PASSED_OVER_REASON, due.count_among(bad))
    model = objects.queue.model
    locked = model.select().where(pw.SQL(locked_condition(relation_name(model), alias='"t1"')))
    while places := list_positions(query, due_at, position, limit=objects.chunk, without=bad):
        keys = [place.key for place in places]
        items, busy = table.read_items(keys), filter_keys(locked, keys)
        kept = find_referenced_items(objects, items, look.settings)
        for one in items:
            if reason := _find_reason_to_keep(one, kept, look.settings, busy=one.id in busy):
                part.add_kept(reason, 1)
            else:
                part.add_record(str(one.id), one.path, one.claimed_until, size=look.sample_size, project=one.project_id)
        position = places[-1]
        look.on_progress(part)
        if look.is_over():
            part.set_estimate(estimate_rows(due, bad))
            break
    part.add_kept(
        exclusions.EXCLUDED_REASON, queries.count_bounded(table.select_due(look.now).where(table.excluded_condition))
    )
    part.add_kept("fresh", queries.count_bounded(table.select_not_due(look.now)))
    part.add_kept("dead", queries.count_bounded(table.select_given_up()))
    yield part


def _find_reason_to_keep(
    one: QueueItem, kept: Mapping[QueueItem, KeptItem], settings: Settings, *, busy: bool
) -> str | None:
    """Return why an object stays."""
    location = str(one.location)
    if busy:
        return BUSY_REASON
    if location not in settings.object_stores:
        return "no_store"
    if one in kept:
        return "named"
    if not is_normal(one.path):
        return "invalid"
    return None if is_below(settings.object_prefixes.get(location, ()), one.path) else "outside"

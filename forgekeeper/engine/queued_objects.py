"""Objects that a queue names, as they are shown: backlog, breaker's stake, quarantine, preview, samples for checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import peewee as pw

from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import batch_of
from forgekeeper.api.objects import Objects
from forgekeeper.api.shown import BUSY, PASSED_OVER, Look, Part, Refused, numbers
from forgekeeper.engine.queue_source import find_kept
from forgekeeper.engine.target import KeptItem
from forgekeeper.platform.database import exclusions, queries
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.queries import START, Stake, among, positions
from forgekeeper.platform.database.survey import expected, held, selected
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.queue import QueueItem, QueueTable
from forgekeeper.targets.objects import is_below, is_normal


def find_some_objects(objects: Objects[Any], location: str) -> list[str]:
    """Return the paths of some objects at the location: of rows that keep theirs, and of objects to delete."""
    sample = None if objects.unless is None else getattr(objects.unless.owner, "sample", None)
    named = [] if sample is None else sample(location)
    return [*named, *QueueTable(objects, "").sample(location)]


def count_backlog(objects: Objects[Any], batch: str, now: datetime) -> Backlog:
    """Count the objects to delete."""
    due_at = objects.queue.due_at
    return Backlog.of(QueueTable(objects, batch).not_excluded(now).order_by(due_at), oldest=due_at)


def stake_of_objects(objects: Objects[Any], batch: str, now: datetime) -> Stake:
    """Return the counts that the breaker weighs: objects to delete, of all known objects.

    These are the objects to delete and the objects that other rows name.
    """
    owners = () if objects.unless is None else (objects.unless.owner,)
    return Stake.rows(QueueTable(objects, batch).not_excluded(now), of=owners)


def refused_objects(objects: Objects[Any], batch: str) -> Refused:
    """Return the quarantine of the queue: the objects that were given up."""
    table = QueueTable(objects, batch)
    return Refused(
        kind=objects.called,
        record=f"dead_{objects.called}",
        count=lambda: queries.count(table.given_up()),
        entries=lambda _settings, limit: table.entries(limit),
        retry=lambda keys: table.retry(numbers(keys)),
        discard=lambda keys: table.discard(numbers(keys)),
    )


def preview_objects(objects: Objects[Any], look: Look) -> Iterator[Part]:
    """Count the objects that would be deleted, by the queue alone: the stores are not asked."""
    table, due_at = QueueTable(objects, batch_of(look.batch)), objects.queue.due_at
    part, bad, position = look.part(objects.record), look.passed_over(objects.record), START
    query = table.not_excluded(look.now)
    due = selected(query, due_at)
    part.keep(PASSED_OVER, due.among(bad))
    model = objects.queue.model
    locked = model.select().where(pw.SQL(held(relation_name(model), alias='"t1"')))
    while places := positions(query, due_at, position, limit=objects.chunk, without=bad):
        keys = [place.key for place in places]
        items, busy = table.items(keys), among(locked, keys)
        kept = find_kept(objects, items, look.settings)
        for one in items:
            if reason := _reason_to_stay(one, kept, look.settings, busy=one.id in busy):
                part.keep(reason, 1)
            else:
                part.one(str(one.id), one.path, one.claimed_until, size=look.size, project=one.project_id)
        position = places[-1]
        look.told(part)
        if look.over():
            part.guess(expected(due, bad))
            break
    part.keep(exclusions.REASON, queries.count(table.due(look.now).where(table.excluded)))
    part.keep("fresh", queries.count(table.later(look.now)))
    part.keep("dead", queries.count(table.given_up()))
    yield part


def _reason_to_stay(
    one: QueueItem, kept: Mapping[QueueItem, KeptItem], settings: Settings, *, busy: bool
) -> str | None:
    """Return why an object stays."""
    location = str(one.location)
    if busy:
        return BUSY
    if location not in settings.object_stores:
        return "no_store"
    if one in kept:
        return "named"
    if not is_normal(one.path):
        return "invalid"
    return None if is_below(settings.object_prefixes.get(location, ()), one.path) else "outside"

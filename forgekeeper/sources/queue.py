"""A queue in a table: claim due items, check or release a claim, retry or remove an item.

A claim sets the instant when an item is due again.  The claim is ours as long as the row has this instant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.api.objects import Locations, Objects
from forgekeeper.api.shown import Entry
from forgekeeper.platform.database import database, exclusions, survey
from forgekeeper.platform.database.naming import quote_name, relation_name
from forgekeeper.platform.database.queries import Page, chosen
from forgekeeper.platform.database.survey import literal

OURS = "({key}, {due_at}) in (select * from unnest(%(ids)s::bigint[], %(claims)s::timestamptz[]))"
CLAIM = """
    update {table} set {due_at} = clock_timestamp() + %(visibility)s
    where {key} = any(array(
        select {key} from {table}
        where {due_at} <= %(now)s and {attempts} < %(max_attempts)s and {location} = any(%(locations)s)
          and ({excluded}) is not true and {share}{chosen}
        order by {due_at}, {key}
        limit %(limit)s
        for update skip locked
    ))
    returning {key}, {path}, {location}, {project}, {due_at}, {created_at}
"""
STILL_CLAIMED = f"select {{key}} from {{table}} where {OURS}"
# The rows are locked, so that a person who holds items back acts before us, or waits until we have deleted them.
# Locks of other sessions are waited for: a second claim locks our rows until it ends, if it found them due before our
# claim ended.  All sessions lock in the order of the keys, so they cannot deadlock.
STILL_OURS = f"{STILL_CLAIMED} order by {{key}} for no key update"
FAIL = f"""
    update {{table}} set {{attempts}} = {{attempts}} + 1,
        {{due_at}} = clock_timestamp() + %(first)s * power(2, least({{attempts}}, 10))
    where {OURS} returning {{attempts}} >= %(max_attempts)s
"""
# Paths are compared, too: after a restore of an older database another row may have the id.
REMOVE = """
    delete from {table} where {key} = any(%(ids)s::bigint[])
        and ({key}, {path}) in (select * from unnest(%(ids)s::bigint[], %(paths)s::text[]))
    returning {key}
"""
PUT_BACK = f"update {{table}} set {{due_at}} = %(now)s where {OURS}"
# Items that a person holds back are due at the end of time, and do not count as failures.
GIVEN_UP = (
    "{attempts} >= %(max_attempts)s and {due_at} < 'infinity' and (%(keys)s::bigint[] is null or {key} = any(%(keys)s))"
)
RETRY = f"update {{table}} set {{attempts}} = 0, {{due_at}} = clock_timestamp() where {GIVEN_UP}"
DISCARD = f"delete from {{table}} where {GIVEN_UP}"


class QueueItem(NamedTuple):
    """A claimed item: its row's *id*, its object's place, and the end of the claim."""

    id: int
    path: str
    location: str | None
    project_id: int | None
    claimed_until: datetime
    created_at: datetime


class QueueTable:
    """The table of a queue in a run of *batch*; each call is one statement of the transaction."""

    def __init__(self, objects: Objects[Any], batch: str) -> None:
        self._objects, self._queue, self._batch = objects, objects.queue, batch

    @cached_property
    def _names(self) -> dict[str, str]:
        """The parts of the statements, by placeholder."""
        queue, objects = self._queue, self._objects
        location = objects.location
        if isinstance(location, Locations):
            whens = " ".join(literal("when %s then %s", pair) for pair in location.names.items())
            written = f"case {_name(location.column)} {whens} end"
        else:
            written = literal("%s::text", [location])
        return {
            "table": relation_name(queue.model),
            "key": _name(queue.model._meta.primary_key),
            "due_at": _name(queue.due_at),
            "attempts": _name(queue.attempts),
            "created_at": _name(queue.created_at),
            "project": "null::bigint" if objects.project is None else _name(objects.project),
            "path": exclusions.written(queue.model, objects.path),
            "location": written,
        }

    @property
    def excluded(self) -> pw.Node:
        """The condition of the items that people exclude from the batch."""
        return exclusions.excluded(self._batch, project=self._objects.project, name=self._objects.path)

    def due(self, now: datetime) -> pw.ModelSelect[Any]:
        """Select the due items, including excluded items."""
        queue = self._queue
        return self._select(queue.due_at <= now, queue.attempts < queue.retry.attempts)

    def not_excluded(self, now: datetime) -> pw.ModelSelect[Any]:
        """Select the due items that nobody excludes."""
        return self.due(now).where(exclusions.but(self.excluded))

    def later(self, now: datetime) -> pw.ModelSelect[Any]:
        """Select the items that are not due yet."""
        queue = self._queue
        return self._select(queue.due_at > now, queue.attempts < queue.retry.attempts)

    def given_up(self) -> pw.ModelSelect[Any]:
        """Select the items whose attempts are used up, the oldest first."""
        queue = self._queue
        return self._select(queue.attempts >= queue.retry.attempts).order_by(queue.model._meta.primary_key)

    @property
    def _share(self) -> pw.Node:
        return pw.SQL("true") if self._objects.share is None else self._objects.share

    def _select(self, *conditions: pw.Node) -> pw.ModelSelect[Any]:
        query: pw.ModelSelect[Any] = self._queue.model.select().where(self._share, *conditions)
        return query

    def at(self, locations: Collection[str], query: pw.ModelSelect[Any]) -> pw.ModelSelect[Any]:
        """Restrict *query* to items at *locations*."""
        return query.where(pw.SQL(f"({self._names['location']}) = any(%s)", [list(locations)]))

    def elsewhere(self, locations: Collection[str], query: pw.ModelSelect[Any]) -> tuple[int, str | None] | None:
        """Return the key and the location of an item of *query* at none of *locations*, or None."""
        where = pw.SQL(f"(({self._names['location']}) = any(%s)) is not true", [list(locations)])
        key = self._queue.model._meta.primary_key
        row: tuple[int, str | None] | None = (
            query.where(where).select(key, pw.SQL(self._names["location"])).order_by(key).tuples().first()
        )
        return row

    def sample(self, location: str) -> list[str]:
        """Return the paths of some items at the location, due or not."""
        path = f"case {self._names['location']} when {literal('%s', [location])} then {self._names['path']} end"
        return survey.sample(self._names["table"], self._names["key"], path)

    def claim(self, now: datetime, page: Page, *, locations: Collection[str], visibility: timedelta) -> list[QueueItem]:
        """Claim a page of due items; after a crash they are due again after *visibility*."""
        values: dict[str, Any] = {"visibility": visibility, "only": page.only, "without": list(page.without)}
        values |= {"locations": list(locations), "now": now, "limit": page.limit}
        values |= {"max_attempts": self._queue.retry.attempts}
        names = self._names | {
            "excluded": exclusions.written(self._queue.model, self.excluded),
            "share": exclusions.written(self._queue.model, self._share),
            "chosen": chosen(self._names["key"], only=page.only, without=page.without),
        }
        return [QueueItem(*row) for row in database.execute_sql(CLAIM.format(**names), values).fetchall()]

    def items(self, keys: Sequence[int]) -> list[QueueItem]:
        """Return the items with these keys, unclaimed, in the order of their due time."""
        names = self._names
        statement = (
            "select {key}, {path}, {location}, {project}, {due_at}, {created_at} from {table}"
            " where {key} = any(%(ids)s) order by {due_at}, {key}"
        )
        rows = database.execute_sql(statement.format(**names), {"ids": list(keys)}).fetchall()
        return [QueueItem(*row) for row in rows]

    def lock_ours(self, items: Sequence[QueueItem]) -> set[int]:
        """Return the keys of the items that we still claim; lock them until the transaction ends."""
        return self._keys(STILL_OURS, _claims(items))

    def find_ours(self, items: Sequence[QueueItem]) -> set[int]:
        """Return the keys of the items that nobody else has claimed since; nothing is locked."""
        return self._keys(STILL_CLAIMED, _claims(items))

    def put_back(self, items: Sequence[QueueItem], now: datetime) -> None:
        """Make the items that are still ours due at *now*; no attempt is counted."""
        database.execute_sql(PUT_BACK.format(**self._names), {**_claims(items), "now": now})

    def fail(self, items: Sequence[QueueItem]) -> int:
        """Count an attempt of each item that is still ours; return how many were the last."""
        retry = self._queue.retry
        values = {**_claims(items), "first": retry.first, "max_attempts": retry.attempts}
        rows = database.execute_sql(FAIL.format(**self._names), values).fetchall()
        return sum(is_last for (is_last,) in rows)

    def remove(self, paths: Mapping[int, str]) -> set[int]:
        """Delete the rows with these keys and paths; return the keys of the deleted rows."""
        return self._keys(REMOVE, {"ids": list(paths), "paths": list(paths.values())})

    def retry(self, keys: Sequence[int] | None) -> int:
        """Retry items that were given up, all of them if *keys* is None; return the number."""
        return self._act(RETRY, keys)

    def discard(self, keys: Sequence[int] | None) -> int:
        """Delete items that were given up, all of them if *keys* is None; return the number.

        Their objects are not deleted.
        """
        return self._act(DISCARD, keys)

    def entries(self, limit: int) -> Iterator[Entry]:
        """Yield up to *limit* items that were given up, the oldest first."""
        key, attempts = self._queue.model._meta.primary_key, self._queue.attempts
        found: dict[int, int] = dict(self.given_up().select(key, attempts).limit(limit).tuples())
        for one in sorted(self.items(list(found))):
            yield Entry(str(one.id), f"could not be deleted: {one.path}", found[one.id], one.created_at)

    def _keys(self, statement: str, values: dict[str, Any]) -> set[int]:
        return {key for (key,) in database.execute_sql(statement.format(**self._names), values).fetchall()}

    def _act(self, statement: str, keys: Sequence[int] | None) -> int:
        values = {"keys": None if keys is None else list(keys), "max_attempts": self._queue.retry.attempts}
        return int(database.execute_sql(statement.format(**self._names), values).rowcount)


def _name(field: pw.Field[Any]) -> str:
    return str(quote_name(field.column_name))


def _claims(items: Sequence[QueueItem]) -> dict[str, Any]:
    return {"ids": [one.id for one in items], "claims": [one.claimed_until for one in items]}

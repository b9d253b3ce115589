"""A queue in a table: claim due items, check or release a claim, retry or remove an item.

A claim sets the instant when an item is due again.  The claim is ours as long as the row has this instant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.api.inspection import RefusedEntry
from forgekeeper.api.objects import Locations, Objects
from forgekeeper.platform.database import database, exclusions, survey
from forgekeeper.platform.database.naming import quote_name, relation_name
from forgekeeper.platform.database.queries import KeyPage, key_condition
from forgekeeper.platform.database.survey import inline_values

CLAIM_UNCHANGED_CONDITION = "({key}, {due_at}) in (select * from unnest(%(ids)s::bigint[], %(claims)s::timestamptz[]))"
CLAIM_DUE_ITEMS = """
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
SELECT_STILL_CLAIMED = f"select {{key}} from {{table}} where {CLAIM_UNCHANGED_CONDITION}"
# The rows are locked, so that a person who holds items back acts before us, or waits until we have deleted them.
# Locks of other sessions are waited for: a second claim locks our rows until it ends, if it found them due before our
# claim ended.  All sessions lock in the order of the keys, so they cannot deadlock.
LOCK_STILL_CLAIMED = f"{SELECT_STILL_CLAIMED} order by {{key}} for no key update"
COUNT_FAILED_ATTEMPTS = f"""
    update {{table}} set {{attempts}} = {{attempts}} + 1,
        {{due_at}} = clock_timestamp() + %(first)s * power(2, least({{attempts}}, 10))
    where {CLAIM_UNCHANGED_CONDITION} returning {{attempts}} >= %(max_attempts)s
"""
# Paths are compared, too: after a restore of an older database another row may have the id.
DELETE_ITEMS = """
    delete from {table} where {key} = any(%(ids)s::bigint[])
        and ({key}, {path}) in (select * from unnest(%(ids)s::bigint[], %(paths)s::text[]))
    returning {key}
"""
MAKE_ITEMS_DUE = f"update {{table}} set {{due_at}} = %(now)s where {CLAIM_UNCHANGED_CONDITION}"
# Items that a person holds back are due at the end of time, and do not count as failures.
GIVEN_UP_CONDITION = (
    "{attempts} >= %(max_attempts)s and {due_at} < 'infinity' and (%(keys)s::bigint[] is null or {key} = any(%(keys)s))"
)
RETRY_GIVEN_UP = f"update {{table}} set {{attempts}} = 0, {{due_at}} = clock_timestamp() where {GIVEN_UP_CONDITION}"
DELETE_GIVEN_UP = f"delete from {{table}} where {GIVEN_UP_CONDITION}"


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
    def _placeholders(self) -> dict[str, str]:
        """The parts of the statements, by placeholder."""
        queue, objects = self._queue, self._objects
        location = objects.location
        if isinstance(location, Locations):
            whens = " ".join(inline_values("when %s then %s", pair) for pair in location.names.items())
            written = f"case {_quoted_column(location.column)} {whens} end"
        else:
            written = inline_values("%s::text", [location])
        return {
            "table": relation_name(queue.model),
            "key": _quoted_column(queue.model._meta.primary_key),
            "due_at": _quoted_column(queue.due_at),
            "attempts": _quoted_column(queue.attempts),
            "created_at": _quoted_column(queue.created_at),
            "project": "null::bigint" if objects.project is None else _quoted_column(objects.project),
            "path": exclusions.condition_sql(queue.model, objects.path),
            "location": written,
        }

    @property
    def excluded_condition(self) -> pw.Node:
        """The condition of the items that people exclude from the batch."""
        return exclusions.excluded_condition(self._batch, project=self._objects.project, name=self._objects.path)

    def select_due(self, now: datetime) -> pw.ModelSelect[Any]:
        """Select the due items, including excluded items."""
        queue = self._queue
        return self._select_items(queue.due_at <= now, queue.attempts < queue.retry.attempts)

    def select_not_excluded(self, now: datetime) -> pw.ModelSelect[Any]:
        """Select the due items that nobody excludes."""
        return self.select_due(now).where(exclusions.is_not_true(self.excluded_condition))

    def select_not_due(self, now: datetime) -> pw.ModelSelect[Any]:
        """Select the items that are not due yet."""
        queue = self._queue
        return self._select_items(queue.due_at > now, queue.attempts < queue.retry.attempts)

    def select_given_up(self) -> pw.ModelSelect[Any]:
        """Select the items whose attempts are used up, the oldest first."""
        queue = self._queue
        return self._select_items(queue.attempts >= queue.retry.attempts).order_by(queue.model._meta.primary_key)

    @property
    def _share_condition(self) -> pw.Node:
        return pw.SQL("true") if self._objects.share is None else self._objects.share

    def _select_items(self, *conditions: pw.Node) -> pw.ModelSelect[Any]:
        query: pw.ModelSelect[Any] = self._queue.model.select().where(self._share_condition, *conditions)
        return query

    def restrict_to_locations(self, locations: Collection[str], query: pw.ModelSelect[Any]) -> pw.ModelSelect[Any]:
        """Restrict *query* to items at *locations*."""
        return query.where(pw.SQL(f"({self._placeholders['location']}) = any(%s)", [list(locations)]))

    def find_elsewhere(self, locations: Collection[str], query: pw.ModelSelect[Any]) -> tuple[int, str | None] | None:
        """Return the key and the location of an item of *query* at none of *locations*, or None."""
        where = pw.SQL(f"(({self._placeholders['location']}) = any(%s)) is not true", [list(locations)])
        key = self._queue.model._meta.primary_key
        row: tuple[int, str | None] | None = (
            query.where(where).select(key, pw.SQL(self._placeholders["location"])).order_by(key).tuples().first()
        )
        return row

    def sample_paths(self, location: str) -> list[str]:
        """Return the paths of some items at the location, due or not."""
        path = (
            f"case {self._placeholders['location']} when {inline_values('%s', [location])} then"
            f" {self._placeholders['path']} end"
        )
        return survey.sample_rows(self._placeholders["table"], self._placeholders["key"], path)

    def claim(
        self, now: datetime, page: KeyPage, *, locations: Collection[str], visibility: timedelta
    ) -> list[QueueItem]:
        """Claim a page of due items; after a crash they are due again after *visibility*."""
        values: dict[str, Any] = {"visibility": visibility, "only": page.only, "without": list(page.without)}
        values |= {"locations": list(locations), "now": now, "limit": page.limit}
        values |= {"max_attempts": self._queue.retry.attempts}
        names = self._placeholders | {
            "excluded": exclusions.condition_sql(self._queue.model, self.excluded_condition),
            "share": exclusions.condition_sql(self._queue.model, self._share_condition),
            "chosen": key_condition(self._placeholders["key"], only=page.only, without=page.without),
        }
        return [QueueItem(*row) for row in database.execute_sql(CLAIM_DUE_ITEMS.format(**names), values).fetchall()]

    def read_items(self, keys: Sequence[int]) -> list[QueueItem]:
        """Return the items with these keys, unclaimed, in the order of their due time."""
        names = self._placeholders
        statement = (
            "select {key}, {path}, {location}, {project}, {due_at}, {created_at} from {table}"
            " where {key} = any(%(ids)s) order by {due_at}, {key}"
        )
        rows = database.execute_sql(statement.format(**names), {"ids": list(keys)}).fetchall()
        return [QueueItem(*row) for row in rows]

    def lock_still_claimed(self, items: Sequence[QueueItem]) -> set[int]:
        """Return the keys of the items that we still claim; lock them until the transaction ends."""
        return self._fetch_keys(LOCK_STILL_CLAIMED, _claim_parameters(items))

    def find_still_claimed(self, items: Sequence[QueueItem]) -> set[int]:
        """Return the keys of the items that nobody else has claimed since; nothing is locked."""
        return self._fetch_keys(SELECT_STILL_CLAIMED, _claim_parameters(items))

    def put_back(self, items: Sequence[QueueItem], now: datetime) -> None:
        """Make the items that are still ours due at *now*; no attempt is counted."""
        database.execute_sql(MAKE_ITEMS_DUE.format(**self._placeholders), {**_claim_parameters(items), "now": now})

    def record_failures(self, items: Sequence[QueueItem]) -> int:
        """Count an attempt of each item that is still ours; return how many were the last."""
        retry = self._queue.retry
        values = {**_claim_parameters(items), "first": retry.first, "max_attempts": retry.attempts}
        rows = database.execute_sql(COUNT_FAILED_ATTEMPTS.format(**self._placeholders), values).fetchall()
        return sum(is_last for (is_last,) in rows)

    def remove(self, paths: Mapping[int, str]) -> set[int]:
        """Delete the rows with these keys and paths; return the keys of the deleted rows."""
        return self._fetch_keys(DELETE_ITEMS, {"ids": list(paths), "paths": list(paths.values())})

    def retry(self, keys: Sequence[int] | None) -> int:
        """Retry items that were given up, all of them if *keys* is None; return the number."""
        return self._change_given_up(RETRY_GIVEN_UP, keys)

    def discard(self, keys: Sequence[int] | None) -> int:
        """Delete items that were given up, all of them if *keys* is None; return the number.

        Their objects are not deleted.
        """
        return self._change_given_up(DELETE_GIVEN_UP, keys)

    def list_entries(self, limit: int) -> Iterator[RefusedEntry]:
        """Yield up to *limit* items that were given up, the oldest first."""
        key, attempts = self._queue.model._meta.primary_key, self._queue.attempts
        found: dict[int, int] = dict(self.select_given_up().select(key, attempts).limit(limit).tuples())
        for one in sorted(self.read_items(list(found))):
            yield RefusedEntry(str(one.id), f"could not be deleted: {one.path}", found[one.id], one.created_at)

    def _fetch_keys(self, statement: str, values: dict[str, Any]) -> set[int]:
        return {key for (key,) in database.execute_sql(statement.format(**self._placeholders), values).fetchall()}

    def _change_given_up(self, statement: str, keys: Sequence[int] | None) -> int:
        values = {"keys": None if keys is None else list(keys), "max_attempts": self._queue.retry.attempts}
        return int(database.execute_sql(statement.format(**self._placeholders), values).rowcount)


def _quoted_column(field: pw.Field[Any]) -> str:
    return str(quote_name(field.column_name))


def _claim_parameters(items: Sequence[QueueItem]) -> dict[str, Any]:
    return {"ids": [one.id for one in items], "claims": [one.claimed_until for one in items]}

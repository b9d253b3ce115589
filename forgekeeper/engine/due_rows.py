"""Counts of due rows: the backlog, the share for the circuit breaker, and rows that wait for the forge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import peewee as pw

from forgekeeper.api.answers import Backlog, DueFunction, Rows, ask_for_rows
from forgekeeper.api.batches import BatchSpec
from forgekeeper.platform.database import database, exclusions, now, queries, survey
from forgekeeper.platform.database.naming import column_name, relation_name
from forgekeeper.platform.settings import Settings
from metrics.catalogue import Gauge, Reading

# One index scan for each class: a scan for all of them would read the whole index to sort it.
FROM_EACH_CLASS = """
    from generate_series(0, {last}) as forgekeeper_class, lateral (
        select {since} as due from {table}
        where {number} = forgekeeper_class and {where}
        order by {since}, {key} limit %(bound)s
    ) as of_class"""
SELECT_OLDEST_DUE = f"select min(due) {FROM_EACH_CLASS}"
COUNT_DUE_ROWS = f"select count(*) from (select {FROM_EACH_CLASS} limit %(bound)s) as counted"
WAITING_COUNT_TIMEOUT_SECONDS = 1.0
"""Time limit for counting rows that wait: a forge without an index for them is not read from end to end."""


def measure_backlog(batch: str, due: DueFunction, record: str, now: datetime) -> Backlog:
    """Count the due rows of a kind, by the same condition as the run."""
    rows = next(rows for rows in ask_for_rows(batch, due, now) if rows.record == record)
    if rows.classes is None and rows.or_where is None:
        return Backlog.from_query(rows.select().order_by(rows.since), oldest=rows.since, after=rows.due_delay)
    found = [_measure_backlog_by_index(part, by_class=number == 0) for number, part in enumerate(rows.split_by_index())]
    oldest = min((one.oldest for one in found if one.oldest), default=None)
    return Backlog(sum(one.records for one in found), oldest)


def _measure_backlog_by_index(rows: Rows[Any], *, by_class: bool) -> Backlog:
    if rows.classes is None or not by_class:
        return Backlog.from_query(rows.select(), oldest=rows.since, after=rows.due_delay)
    oldest = _query_each_class(SELECT_OLDEST_DUE, rows, 1)
    return Backlog(
        _query_each_class(COUNT_DUE_ROWS, rows, queries.MAX_COUNTED_ROWS), oldest and oldest + rows.due_delay
    )


def _query_each_class(statement: str, rows: Rows[Any], bound: int) -> Any:
    assert rows.classes is not None, "rows without classes"
    is_dated = pw.Expression(rows.due_of_all_shares, "AND", rows.since.is_null(False))
    names = {
        "last": rows.classes.count - 1,
        "number": rows.classes.number.replace("%", "%%"),
        "since": column_name(rows.since),
        "table": relation_name(rows.model),
        "key": column_name(rows.model._meta.primary_key),
        "where": exclusions.condition_sql(rows.model, is_dated),
    }
    return database.execute_sql(statement.format(**names), {"bound": bound}).fetchone()[0]


def measure_affected_rows(batch: str, due: DueFunction, now: datetime) -> queries.AffectedShare:
    """Return the counts for the circuit breaker: due rows with their followers, of all rows in their tables."""
    found = ask_for_rows(batch, due, now)
    models = [
        model for rows in found for model in (rows.model, *(rows.follower_models if rows.shows_followers else ()))
    ]
    return queries.AffectedShare(partial(_count_due_of_all, found), partial(queries.count_rows, models))


def _count_due_of_all(rows: Sequence[Rows[Any]], bound: int) -> int:
    found = 0
    for one in rows:
        found += _count_due_rows(one, bound - found) if found < bound else 0
    return found


def _count_due_rows(rows: Rows[Any], bound: int) -> int:
    if rows.shown_followers:
        return sum(rows.count_with_followers(bound).values())
    (key,) = rows.model._meta.get_primary_keys()
    first, *others = rows.split_by_index()
    found = (
        first.select(key).limit(bound).count()
        if rows.classes is None
        else _query_each_class(COUNT_DUE_ROWS, first, bound)
    )
    return int(found) + sum(one.select(key).limit(bound).count() for one in others)


def show_waiting_rows(batch: BatchSpec, rows: Rows[Any], called: str, due: DueFunction) -> None:
    """Let the exporter count the rows that only the forge can decide about."""
    name = f"waiting_{called}s"
    text = f"Expired {called}s that only the forge can decide about (counted up to a bound)."
    gauge = Gauge(name, text, ("reason",), tuple((reason,) for reason in rows.waits))
    batch.add_collector(name, gauges=[gauge])(partial(_count_waiting, batch.name, due, rows.record, name))


def _count_waiting(batch: str, due: DueFunction, record: str, name: str, _settings: Settings) -> Iterator[Reading]:
    """Count the rows of each reason; leave out a reason that takes too long to count."""
    rows = next(rows for rows in ask_for_rows(batch, due, now()) if rows.record == record)
    assert rows.now is not None, "ask_for_rows binds the rows"
    is_past = rows.since < rows.now - rows.due_delay
    for reason, condition in rows.waits.items():
        found = partial(queries.count_bounded, rows.model.select().where(is_past, pw.SQL(condition)))
        if (records := survey.answer_within(time.monotonic() + WAITING_COUNT_TIMEOUT_SECONDS, found)) is not None:
            yield Reading(name, records, (reason,))

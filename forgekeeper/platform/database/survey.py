"""Counts of rows for previews: by project, with size and oldest row, and the first rows.

If time runs out before all rows are counted, PostgreSQL's estimate is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import peewee as pw

from forgekeeper.platform.database import database, sqlstate
from forgekeeper.platform.database.naming import column_name, relation_name
from forgekeeper.platform.database.queries import key_condition
from forgekeeper.platform.database.read_only import read_only_snapshot

QUERY_CANCELED = "57014"
MIN_TIMEOUT_SECONDS = 0.05
"""Minimum time limit of a statement, in seconds, even if no time is left: there may be few rows to count."""
Answer = TypeVar("Answer")

# Every transaction that has changed or locked anything holds a lock on its own number.  So another session holds a row
# if the row's xmax is such a number.  Taking the row's lock instead would write, and is refused here.
RUNNING_TRANSACTIONS = """any(array(
    select transactionid from pg_locks where locktype = 'transactionid' and mode = 'ExclusiveLock' and granted
))"""
SELECT_HAS_XMAX = "select relkind in ('r', 'p') from pg_class where oid = to_regclass(%(table)s)"
SELECT_TOTALS = """
    select project, count(*), count(*) filter (where not busy), sum(bytes) filter (where not busy)::bigint,
        min(due) filter (where not busy)
    from ({rows}) as rows group by project
"""
SELECT_FIRST_ROWS = (
    "select id::text, name, due from ({rows}) as rows where not busy order by rows.due, rows.id limit %(size)s"
)

MAX_SAMPLED_ROWS = 20
MAX_LOOKED_UP_ROWS = 100
"""Rows that `missed` looks up, to learn whether lookups find all rows."""
# Random points in the range of keys, and the next row after each: a large table is not scanned.
SELECT_SAMPLE = """
    with span as (
        select min({key}) as low, max({key}) as high from {table}
    ), points as materialized (
        select floor(low + random()::numeric * (high::numeric - low + 1))::bigint as point
        from span, generate_series(1, %(size)s)
    )
    select distinct path from points, lateral (
        select {path} as path from {table} where {key} >= point order by {key} limit 1
    ) as found
    where path <> ''
"""


class ProjectCounts(NamedTuple):
    """Counts of a project's rows, or of rows without a project.

    *free* rows are not locked; *bytes* and *oldest* are their size and the instant since which they are due.
    """

    project: str | None
    rows: int
    free: int
    bytes: int | None
    oldest: datetime | None


class FirstRow(NamedTuple):
    """A row of the rows that became due first."""

    id: str
    name: str | None
    due: datetime


class Survey(NamedTuple):
    """The result of `survey_rows`.

    If time ran out during the count, *groups* is empty and *expected* is PostgreSQL's estimate.  If time ran out during
    the search for the first rows, *first* is None.
    """

    groups: Sequence[ProjectCounts]
    first: Sequence[FirstRow] | None
    expected: int | None = None


@dataclass(frozen=True)
class SurveyedRows:
    """The rows of *table* that meet a condition, and the expressions that describe each row.

    *due* is the column with the instant since which a row is due; rows are ordered by it.  *key* is a column, or an
    expression that is as unique.  *busy* is the condition of further rows that a run leaves for later, as it does with
    locked rows.
    """

    table: str
    where: str
    values: Mapping[str, Any]
    due: str
    key: str = "id"
    name: str = "null::text"
    project: str = "null::text"
    size: str = "null::bigint"
    busy: str = "false"

    def select_statement(self, without: Collection[int] = ()) -> str:
        """Return the query of the rows, except rows with the keys *without*."""
        columns = (
            f"{self.key} as id, {self.name} as name, {self.due} as due, {self.project}::text as project,"
            f" {self.size} as bytes, {locked_condition(self.table)} or {self.busy} as busy"
        )
        condition = self.where + key_condition(self.key, without=without)
        values = {**self.values, "without": list(without)}
        return inline_values(f"select {columns} from {self.table} where {condition}", values)

    def count_each(self, conditions: Mapping[str, str]) -> dict[str, int]:
        """Count the rows that also meet each of *conditions*, by the condition's name."""
        columns = ", ".join(f"count(*) filter (where {condition})" for condition in conditions.values())
        statement = f"select {columns} from {self.table} where {self.where}"
        row = database.execute_sql(statement, dict(self.values)).fetchone()
        return dict(zip(conditions, row, strict=True))

    def count_among(self, keys: Collection[int]) -> int:
        """Count the rows with these keys."""
        condition = self.where + key_condition(self.key, only=list(keys))
        values = {**self.values, "only": list(keys)}
        statement = f"select count(*) from {self.table} where {condition}"
        count: int = database.execute_sql(statement, values).fetchone()[0]
        return count


def rows_of_query(query: pw.ModelSelect[Any], due: pw.Field[Any]) -> SurveyedRows:
    """Return the rows of *query* as `Rows`."""
    model = query.model
    key = column_name(model._meta.primary_key)
    where = f"{key} in ({inline_values(*query.select(model._meta.primary_key).sql())})"
    return SurveyedRows(relation_name(model), where, {}, due=column_name(due), key=key)


def inline_values(statement: str, values: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the statement with its values, escaped for use in another statement with values."""
    with database.connection().cursor() as cursor:
        text: str = cursor.mogrify(statement, values).decode()
    return text.replace("%", "%%")


def survey_rows(rows: SurveyedRows, *, without: Collection[int] = (), size: int, until: float) -> Survey:
    """Count the rows, except the keys *without*, and name the first *size* of them.

    *until* is the deadline, an instant of the monotonic clock.
    """
    statement = rows.select_statement(without)
    now = time.monotonic()
    a_third = now + max(0.0, until - now) / 3
    first = answer_within(
        a_third, lambda: [FirstRow(*row) for row in _fetch_rows(SELECT_FIRST_ROWS, statement, {"size": size})]
    )
    groups = answer_within(until, lambda: [ProjectCounts(*row) for row in _fetch_rows(SELECT_TOTALS, statement, {})])
    return Survey((), first, estimate_rows(rows, without)) if groups is None else Survey(groups, first)


def _fetch_rows(asking: str, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = database.execute_sql(asking.format(rows=statement), dict(values)).fetchall()
    return found


def answer_within(until: float, ask: Callable[[], Answer]) -> Answer | None:
    """Return the answer of *ask*, None if PostgreSQL does not answer by *until*.

    After a timeout the look can be continued.
    """
    left = max(MIN_TIMEOUT_SECONDS, until - time.monotonic())
    try:
        with read_only_snapshot():
            database.execute_sql("set local statement_timeout = %s", [round(left * 1_000)])
            return ask()
    except pw.OperationalError as error:
        if sqlstate(error) != QUERY_CANCELED:
            raise
        return None


def estimate_rows(rows: SurveyedRows, without: Collection[int] = ()) -> int:
    """Return PostgreSQL's estimate of the number of rows, by its statistics; no row is read."""
    ((plans,),) = _fetch_rows("explain (format json) {rows}", rows.select_statement(without), {})
    return int(plans[0]["Plan"]["Plan Rows"])


def locked_condition(table: str, *, alias: str | None = None) -> str:
    """Return the condition that another session holds a row of *table*; false for views."""
    row = database.execute_sql(SELECT_HAS_XMAX, {"table": table}).fetchone()
    return f"{alias or table}.xmax = {RUNNING_TRANSACTIONS}" if row and row[0] else "false"


def sample_rows(table: str, key: str, path: str, *, size: int = MAX_SAMPLED_ROWS) -> list[str]:
    """Return the expression *path* of up to *size* rows of *table*, which has a numeric *key*."""
    statement = SELECT_SAMPLE.format(table=table, key=key, path=path)
    return [row[0] for row in database.execute_sql(statement, {"size": size}).fetchall()]


def find_missed_rows(table: str, key: str, path: str, look_up: Callable[[Sequence[str]], set[str]]) -> set[str]:
    """Return the paths of a sample of rows that *look_up* does not find, in one snapshot.

    A damaged index that misses one row in twenty is noticed in 99 of 100 calls.
    """
    with read_only_snapshot():
        paths = sample_rows(table, key, path, size=MAX_LOOKED_UP_ROWS)
        return set(paths) - look_up(paths)

"""A look at rows that changes nothing: how many there are, whose, since when, and some of them by name.

All statements of a look see one snapshot, in a transaction that PostgreSQL itself lets only read.  Rows are
taken in pages, so that a look which has to end has counted something by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import chosen, database, sqlstate

PAGE_SIZE = 50_000
TOOK_TOO_LONG = "57014"
SHORTEST = 0.05
"""Seconds that a statement gets at least: the first may count something even where there is no time left."""
Answer = TypeVar("Answer")

READ_ONLY = "set transaction isolation level repeatable read, read only"
# Every transaction that has changed or locked anything holds a lock on its own number.  So a row is held by another
# where its xmax is such a number; asking for the row's lock instead would write, and is refused here.
RUNNING = """any(array(
    select transactionid from pg_locks where locktype = 'transactionid' and mode = 'ExclusiveLock' and granted
))"""
HAS_XMAX = "select relkind in ('r', 'p') from pg_class where oid = to_regclass(%(table)s)"
PAGE = """
    with page as materialized (
        select id, name, due, project, bytes, busy from ({rows}) as rows {beyond}
        order by due, id limit %(limit)s
    ), free as (
        select * from page where not busy
    )
    select (select count(*) from page), (select count(*) from free), (select sum(bytes)::bigint from free),
        (select min(due) from free), (select max(due) from free),
        (select coalesce(jsonb_object_agg(project, records), '{{}}') from (
            select project, count(*) as records from free where project is not null group by project
        ) as projects),
        array(select id::text from free order by due, id limit %(sample)s),
        array(select name from free order by due, id limit %(sample)s),
        last.due::text, last.id::text
    from (select due, id from page order by due desc, id desc limit 1) as last
"""
BEYOND = "where (due, id) > (%(due)s, %(id)s)"


class Page(NamedTuple):
    """Some rows: how many, how many of them nobody holds, and of those how much, since when, whose, and the first.

    *due* and *key* are where the next page begins.
    """

    rows: int
    free: int
    bytes: int | None
    oldest: datetime | None
    newest: datetime | None
    projects: Mapping[str, int]
    ids: Sequence[str]
    names: Sequence[str | None]
    due: str
    key: str


@contextmanager
def reading() -> Iterator[None]:
    """Let everything within see one snapshot, and PostgreSQL refuse whatever would write."""
    with database.atomic():
        database.execute_sql(READ_ONLY)
        yield


@dataclass(frozen=True)
class Rows:
    """The rows of *table* that meet a condition, and what a look says of each.

    *due* is a column, by which they are ordered and since when they count; *key* is another, or what is as good as one.
    """

    table: str
    where: str
    values: Mapping[str, Any]
    due: str
    key: str = "id"
    name: str = "null::text"
    project: str = "null::text"
    size: str = "null::bigint"

    def statement(self, without: Collection[int] = ()) -> str:
        """Return what selects them, but for those of some keys."""
        columns = (
            f"{self.key} as id, {self.name} as name, {self.due} as due, {self.project}::text as project,"
            f" {self.size} as bytes, {held(self.table)} as busy"
        )
        condition = self.where + chosen(self.key, without=without)
        values = {**self.values, "without": list(without)}
        return literal(f"select {columns} from {self.table} where {condition}", values)

    def counts(self, conditions: Mapping[str, str]) -> dict[str, int]:
        """Count them, apart by what else they meet."""
        columns = ", ".join(f"count(*) filter (where {condition})" for condition in conditions.values())
        statement = f"select {columns} from {self.table} where {self.where}"
        row = database.execute_sql(statement, dict(self.values)).fetchone()
        return dict(zip(conditions, row, strict=True))

    def among(self, keys: Collection[int]) -> int:
        """Count those of these keys."""
        condition = self.where + chosen(self.key, only=list(keys))
        values = {**self.values, "only": list(keys)}
        statement = f"select count(*) from {self.table} where {condition}"
        count: int = database.execute_sql(statement, values).fetchone()[0]
        return count


@dataclass(frozen=True)
class Selected:
    """The same of what a *query* selects; without *due* it is the instant that the query asks for first."""

    query: pw.ModelSelect[Any]
    due: pw.Field[Any] | None = None

    def statement(self, without: Collection[int] = ()) -> str:
        """Return what selects them, but for those of some keys."""
        model = self.query.model
        key = model._meta.primary_key
        due = self.due or _instant_in(self.query._where)  # type: ignore[attr-defined]  # noqa: SLF001, peewee tells it nowhere else
        query = self.query.where(key.not_in(list(without))) if without else self.query
        busy = pw.SQL(held(model._meta.table_name, alias='"t1"'))
        none = pw.SQL("null::text")
        selected = query.select(
            key.alias("id"),
            none.alias("name"),
            (pw.SQL("timestamptz '-infinity'") if due is None else due).alias("due"),
            none.alias("project"),
            pw.SQL("null::bigint").alias("bytes"),
            busy.alias("busy"),
        )
        return literal(*selected.sql())

    def among(self, keys: Collection[int]) -> int:
        """Count those of these keys."""
        key = self.query.model._meta.primary_key
        return int(self.query.where(key.in_(list(keys))).count())


def _instant_in(condition: Any) -> pw.Field[Any] | None:
    """Return the first column of instants that a condition names."""
    if isinstance(condition, pw.Expression):
        return _instant_in(condition.lhs) or _instant_in(condition.rhs)
    return condition if isinstance(condition, DateTimeTZField) else None


def literal(statement: str, values: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the statement with its values in it, ready to become a part of another that has values."""
    with database.connection().cursor() as cursor:
        text: str = cursor.mogrify(statement, values).decode()
    return text.replace("%", "%%")


def survey(statements: Sequence[str], *, sample: int, until: float, limit: int = PAGE_SIZE) -> Iterator[Page | None]:
    """Yield the rows that the statements select in pages, a page of each by turns; None where the time was up first.

    *until* is an instant of the monotonic clock.
    """
    places: list[tuple[str, tuple[str, str] | None]] = [(rows, None) for rows in statements]
    while places:
        rows, last = places.pop(0)
        beyond = BEYOND if last else ""
        due, key = last or (None, None)
        values = {"due": due, "id": key, "limit": limit, "sample": sample}
        try:
            found = within(until, partial(_page, PAGE.format(rows=rows, beyond=beyond), values))
        except TimeoutError:
            yield None
            return
        if found is None:
            continue
        yield found
        if found.rows == limit:
            places.append((rows, (found.due, found.key)))
        if places and time.monotonic() >= until:
            yield None
            return


def within(until: float, ask: Callable[[], Answer]) -> Answer:
    """Ask; raise `TimeoutError` where PostgreSQL has not answered by *until*.  The look goes on after it."""
    left = max(SHORTEST, until - time.monotonic())
    try:
        with database.atomic():
            database.execute_sql("set local statement_timeout = %s", [round(left * 1_000)])
            return ask()
    except pw.OperationalError as error:
        if sqlstate(error) != TOOK_TOO_LONG:
            raise
        raise TimeoutError from None


def expected(statements: Sequence[str]) -> int:
    """Return how many rows PostgreSQL expects the statements to select, by its statistics; it reads none."""
    plans = [database.execute_sql(f"explain (format json) {rows}".replace("%%", "%")).fetchone() for rows in statements]
    return sum(int(plan[0]["Plan"]["Plan Rows"]) for (plan,) in plans)


def held(table: str, *, alias: str | None = None) -> str:
    """Return the condition that another session has a row of *table* locked; rows of a view do not tell."""
    row = database.execute_sql(HAS_XMAX, {"table": table}).fetchone()
    return f"{alias or table}.xmax = {RUNNING}" if row and row[0] else "false"


def _page(statement: str, values: Mapping[str, Any]) -> Page | None:
    row = database.execute_sql(statement, dict(values)).fetchone()
    return Page(*row) if row else None

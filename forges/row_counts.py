"""Counts or estimates of rows that a batch would delete from a forge's tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from forgekeeper.api.answers import Rows
from forgekeeper.engine.statement import write_bytes
from forgekeeper.platform.database import database, survey
from forgekeeper.platform.database.naming import column_name, relation_name, write_expression
from forges.forge_tables import ForgeTables

SAMPLED_ROWS = 10_000
"""Due rows that are sampled to estimate the size of all."""
SELECT_DUE_TOTALS = "select count(*), {total}, min({since}) from {table} where {due}"
SELECT_AVERAGE_SIZE = """
    select avg(size), min(since) from (
        select {size} as size, {since} as since from {table} where {due} order by {since} limit {rows}
    ) as sampled
"""
EXPLAIN_STATEMENT = "explain (format json) {statement}"
SELECT_KEPT_COUNTS = "select {counts} from {table} where {since} < %s and ({due}) is not true"

Condition = tuple[str, list[Any]]
"""SQL and its values."""


@dataclass
class RowCount:
    """Number of rows of a kind that a run would delete now, and of rows that stay.

    *bytes* is None for rows without size. An *estimate* was made because the time limit ended the count: *records* is
    then the planner's estimate, and *bytes* is extrapolated from a sample. *kept* is the number of rows that stay, by
    reason; None if the time limit ended the count.
    """

    record: str
    verb: str
    records: int = 0
    estimate: bool = False
    bytes: int | None = None
    oldest: datetime | None = None
    kept: dict[str, int | None] = field(default_factory=dict)


def count_rows(rows: Rows[Any], tables: ForgeTables, instant: datetime, until: float) -> RowCount:
    """Count rows that would be deleted at *instant*, and rows that look due and stay.

    *until* is an instant of the monotonic clock; counts that are not finished by then are estimated.
    """
    counting = _RowCounter(rows, tables, instant)
    made = RowCount(rows.record, rows.verb)
    left = until - time.monotonic()
    if not counting.count_due(made, until - left / 2):
        counting.estimate_due(made, until - left / 4)
    made.kept = counting.count_kept(until)
    return made


@dataclass
class _RowCounter:
    rows: Rows[Any]
    tables: ForgeTables
    instant: datetime

    def count_due(self, made: RowCount, until: float) -> bool:
        """Count the rows that would be deleted; return False if the time is up."""
        total = "null" if self._size_expression is None else f"coalesce(sum({self._size_expression}), 0)::bigint"
        row = survey.answer_within(
            until, lambda: self._fetch_row(SELECT_DUE_TOTALS, self._due_condition[1], total=total)
        )
        if row is None:
            return False
        made.records, made.bytes, oldest = row
        made.oldest = oldest and oldest + self.rows.due_delay
        return True

    def estimate_due(self, made: RowCount, until: float) -> None:
        """Estimate the number by PostgreSQL's planner, and size and age by the oldest rows."""
        made.estimate = True
        statement = self.tables.write_statement(self._fill_statement("select from {table} where {due}"))
        ((plans,),) = database.execute_sql(
            EXPLAIN_STATEMENT.format(statement=statement), self._due_condition[1]
        ).fetchall()
        made.records = int(plans[0]["Plan"]["Plan Rows"])
        size = self._size_expression or "null::bigint"
        row = survey.answer_within(
            until, lambda: self._fetch_row(SELECT_AVERAGE_SIZE, self._due_condition[1], size=size, rows=SAMPLED_ROWS)
        )
        if row is not None:
            average, oldest = row
            made.bytes = None if average is None else round(made.records * average)
            made.oldest = oldest and oldest + self.rows.due_delay

    def count_kept(self, until: float) -> dict[str, int | None]:
        """Count rows that look due and stay, by reason; None for each if the time is up."""
        reasons: dict[str, Condition] = {reason: (text, []) for reason, text in self.rows.stay_reasons.items()}
        due, values = self._write_condition(self.rows.condition_of_all_shares)
        for reason, (spared, more) in self._spared_conditions.items():
            reasons[reason] = f"({due}) and ({spared})", [*values, *more]
        if not reasons:
            return {}
        counts = ", ".join(f"count(*) filter (where {text})" for text, _values in reasons.values())
        given = [value for _text, values in reasons.values() for value in values]
        given += [self.instant - self.rows.due_delay, *self._due_condition[1]]
        row = survey.answer_within(until, lambda: self._fetch_row(SELECT_KEPT_COUNTS, given, counts=counts))
        each = [None] * len(reasons) if row is None else row
        return {reason: count for reason, count in zip(reasons, each, strict=True) if count != 0}

    @cached_property
    def _spared_conditions(self) -> dict[str, Condition]:
        every = self.rows.kept
        return {one.reason: self._write_condition(one.where) for one in every if self.tables.has_relation(one.model)}

    @cached_property
    def _due_condition(self) -> Condition:
        """Condition of the rows that would be deleted."""
        text, values = self._write_condition(self.rows.condition_of_all_shares)
        text = f"({text}) and {column_name(self.rows.since)} is not null"
        for spared, more in self._spared_conditions.values():
            text, values = f"{text} and ({spared}) is not true", [*values, *more]
        return text, values

    @property
    def _size_expression(self) -> str | None:
        return None if self.rows.size is None else write_bytes(self.rows.size)

    def _write_condition(self, expression: Any) -> Condition:
        return write_expression(self.rows.model, expression)

    def _fill_statement(self, statement: str, **words: Any) -> str:
        known = {
            "table": relation_name(self.rows.model),
            "since": column_name(self.rows.since),
            "due": self._due_condition[0],
        }
        return statement.format(**known, **words)

    def _fetch_row(self, statement: str, values: Sequence[Any], **words: Any) -> Any:
        return self.tables.fetch_row(self._fill_statement(statement, **words), values)

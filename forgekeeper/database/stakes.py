"""What is at stake in a run: how much is due of how much there is; estimated, and bounded in time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import peewee as pw

from forgekeeper.database import Base, database

PAGES = """
    select case when relkind in ('r', 'm') and reltuples >= 0 and relpages > 0
        then reltuples / relpages * (pg_relation_size(oid) / current_setting('block_size')::float) end
    from pg_class where oid = to_regclass(%s)
"""


class Stake(NamedTuple):
    """Of a batch: *due* counts what its runs would delete, *of* what there is; either up to a bound."""

    due: Callable[[int], int]
    of: Callable[[int], int]

    @classmethod
    def rows(cls, *queries: pw.ModelSelect[Any], of: tuple[type[Base], ...] = ()) -> Stake:
        """Count the rows that *queries* select, of the tables of their models and of those named."""
        models = (*(query.model for query in queries), *of)
        return cls(lambda bound: _count(queries, bound), lambda bound: _rows(models, bound))


AtStake: TypeAlias = Callable[[datetime], Stake]


def _count(queries: tuple[pw.ModelSelect[Any], ...], bound: int) -> int:
    found = 0
    for query in queries:
        key = query.model._meta.primary_key
        found += query.select(key).limit(bound - found).count() if found < bound else 0
    return found


def _rows(models: tuple[type[Base], ...], bound: int) -> int:
    """Estimate the tables' rows as PostgreSQL's planner does; where it cannot, count them up to the bound."""
    found = 0
    for model in models:
        (estimate,) = database.execute_sql(PAGES, (model._meta.table_name,)).fetchone() or (None,)
        found += round(estimate) if estimate is not None else _count((model.select(),), bound)
    return found

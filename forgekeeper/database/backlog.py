"""How much is due, and since when: counted up to a bound, as it is asked every few seconds."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.database import database

BOUND = 100_001
"""What is more is shown as a hundred thousand and more."""
NO_TIME = timedelta(0)


class Backlog(NamedTuple):
    """How many records are due, at most `BOUND`, and when the oldest became due."""

    records: int
    oldest: datetime | None = None

    @classmethod
    def of(cls, query: pw.ModelSelect[Any], *, oldest: pw.Field[Any], after: timedelta = NO_TIME) -> Backlog:
        """Count what *query* selects; each became due at the instant in that field, or so much *after* it.

        Without an order the oldest is that of those which were counted.
        """
        found = query.select(oldest.alias("due")).limit(BOUND)
        row = pw.Select([found], [pw.fn.count(pw.SQL("1")), pw.fn.min(found.c.due)]).bind(database).tuples().execute()
        records, instant = row[0]
        return cls(records, instant and instant + after)


def count(query: pw.ModelSelect[Any]) -> int:
    """Count what *query* selects, up to the bound."""
    counted: int = query.limit(BOUND).count()
    return counted

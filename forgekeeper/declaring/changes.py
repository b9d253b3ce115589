"""Rows of a table that become something else now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from forgekeeper.declaring.answers import Mistake
from forgekeeper.declaring.rows import Row, Rows

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Changes(Rows[Row]):
    """Rows that are changed by the document's own *statement*, a page of them at a time, instead of being deleted.

    The statement names the page's keys ``%(ids)s``, the run's time ``%(now)s`` and the condition ``{due}``, has a part
    ``changed`` that returns a row for each that was changed, its key called ``id``, and says ``{recorded}`` behind its
    last part: there the engine writes the audit and counts.  It repeats the condition where it changes rows, so that
    what moves on meanwhile stays.

    *each* is called with each row of ``changed`` after the commit: it may log it, and returns what it counts.  The
    audit keeps what *audit* says, over ``changed``.  Fields ``skipped`` and ``failed`` of the result count rows that
    moved on, and bad ones.

    Raises `Mistake` for a statement without one of these.
    """

    _: KW_ONLY
    statement: str
    each: Callable[[tuple[Any, ...]], Counts]
    verb: str = "changed"

    def __post_init__(self) -> None:
        """Refuse a statement that the engine could not record."""
        super().__post_init__()
        for part in ("%(ids)s", "{due}", "{recorded}", "changed as"):
            if part not in self.statement:
                raise Mistake(f"Changes of {self.record}: its statement has no {part}")

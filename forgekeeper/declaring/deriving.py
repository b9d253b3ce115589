"""What follows from a batch's answer before it runs: its records, its tables, the fields of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, make_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from forgekeeper.declaring.answers import Answer, Mistake
from forgekeeper.declaring.items import Items
from forgekeeper.declaring.rows import Rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ANY_INSTANT = datetime(2000, 1, 1, tzinfo=UTC)
"""At which a batch is asked what it would delete, for the shape of its answer alone."""

Due = Callable[[datetime], "Answer | Iterable[Answer]"]


class Shape(NamedTuple):
    """What a batch deletes, as far as its answer says so."""

    rows: tuple[Rows[Any], ...] = ()
    items: tuple[Items[Any], ...] = ()

    def outcome(self, name: str) -> type[DataclassInstance]:
        """Make what a run comes to: a field for what each counts, the chunks, and why it stopped."""
        counted = [one for rows in self.rows for one in (rows.counted, rows.counted_bytes) if one]
        counted += ["batches"] if self.rows else []
        counted += [one for items in self.items for one in (*items.processed, *items.failed)]
        fields = [(one, int, field(default=0)) for one in dict.fromkeys(counted)]
        return make_dataclass(
            "Outcome", [*fields, ("stopped", str, field(default="drained"))], namespace={"__doc__": f"Of {name}."}
        )


def shape_of(name: str, due: Due) -> Shape:
    """Ask what would go, at any instant, for the shape of the answer; nothing of it is executed.

    Raises `Mistake` where that needs what is not there before a run.
    """
    try:
        answers = list(_answers(name, due, ANY_INSTANT))
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(
            f"{name} cannot say what it deletes before it runs ({type(error).__name__}: {error}):"
            " build the expression alone, or name what is due with due=, or declare records=, tables= and outcome="
        ) from error
    rows = tuple(one for one in answers if isinstance(one, Rows))
    return Shape(rows, tuple(one for one in answers if isinstance(one, Items)))


def rows_of(name: str, due: Due, now: datetime) -> list[Rows[Any]]:
    """Return the rows that are due at an instant; raise `Mistake` for an answer that is none."""
    return [one for one in _answers(name, due, now) if isinstance(one, Rows)]


def _answers(name: str, due: Due, now: datetime) -> Iterator[Answer]:
    answer = due(now)
    for one in [answer] if isinstance(answer, Answer) or answer is None else answer:
        if not isinstance(one, Answer):
            raise Mistake(f"{name} answers with {one!r}: return Rows, Items, Children or Skip")
        yield one

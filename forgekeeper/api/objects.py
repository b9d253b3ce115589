"""`Objects`: the objects in a store that rows of a queue name.  The engine deletes them, and then the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.answers import AN_HOUR, WHOLE_NUMBERS, Answer, Mistake, record_of
from forgekeeper.platform.database import Base

Row = TypeVar("Row", bound=Base)


class Retry(NamedTuple):
    """When a failed item is tried again: after *first*, then after twice as long each time, *attempts* times in all."""

    first: timedelta = timedelta(minutes=1)
    attempts: int = 10


DEFAULT_RETRY = Retry()


@dataclass(frozen=True)
class Queue(Generic[Row]):
    """Rows of *model*, each of which is work that is due at *due_at*.

    A claim moves *due_at* ahead: if the worker dies, another one finds the row due then.  A failure moves it ahead by
    *retry* and counts in *attempts*; after the last attempt the row waits in quarantine for a person.  The audit
    stores *created_at* as the item's due time.  With an index on *due_at* and the key a claim is one index scan.

    Raises `Mistake` for columns of another type or table.
    """

    model: type[Row]
    _: KW_ONLY
    due_at: pw.Field[Any]
    attempts: pw.Field[Any]
    created_at: pw.Field[Any]
    retry: Retry = DEFAULT_RETRY

    def __post_init__(self) -> None:
        """Refuse columns that allow no claim."""
        name = self.model.__name__
        for option in ("due_at", "created_at", "attempts"):
            column, is_time = getattr(self, option), option != "attempts"
            kind = DateTimeTZField if is_time else pw.IntegerField
            if not isinstance(column, kind) or column.model is not self.model:
                wanted = "times (DateTimeTZField)" if is_time else "whole numbers (IntegerField)"
                raise Mistake(f"Queue of {name}: {option} has to be a column of {name} for {wanted}")
        if not isinstance(self.model._meta.primary_key, WHOLE_NUMBERS):
            raise Mistake(f"Queue of {name}: its primary key has to be one column of whole numbers")
        if self.retry.attempts < 1:
            raise Mistake(f"Queue of {name}: an item has one attempt at least, not {self.retry.attempts}")


class Locations(NamedTuple):
    """The location of each object by the value of a *column*."""

    column: pw.Field[Any]
    names: Mapping[int, str]


class Owner(Protocol):
    """A table with rows that name objects at *locations*; *sentence* is the reason for keeping such an object."""

    locations: Sequence[str]
    sentence: str

    def named(self, paths: Sequence[str]) -> set[str]:
        """Return those of *paths* that a row names."""


class NamedBy(NamedTuple):
    """Rows that keep objects: an object that the *owner* names stays, and its row is removed.

    If *unsure* names it, too, the row stays as well, as after a failure: only a person can know whose it is.  If the
    owner has a method ``sample(location)``, `check` looks for the objects at the paths that it returns.
    """

    owner: Any
    unsure: Any = None


@dataclass(frozen=True)
class Objects(Answer, Generic[Row]):
    """Objects in stores, one for each due row of the queue *source*.

    *location* names the object's place in ``FORGEKEEPER_OBJECT_STORES``, or is the column that does, and *path* is the
    object's place in it.  An object that rows of another table name is kept (*unless*).  People exclude objects by
    *project*, the column with its id, and by their paths.

    An object counts as deleted once its store has said so and its sentinel was read afterwards; then its row is
    removed.  The audit records the intent before and the outcome after: if the process dies in between, the next run
    asks the store.  If one store does not answer, the objects of the others are deleted, and then the run fails.

    *chunk* objects are claimed at a time, and may wait for *objective* after they are due.  *called* names
    an object in quarantine, *record* in metrics and audit; the default of both is the model's name.

    Raises `Mistake` for a location, path or project that is not a column of the queue's table.
    """

    source: Queue[Row]
    _: KW_ONLY
    location: str | Locations
    path: pw.Node
    project: pw.Field[Any] | None = None
    unless: NamedBy | None = None
    chunk: int = 1_000
    objective: timedelta = AN_HOUR
    called: str = ""
    record: str = ""

    def __post_init__(self) -> None:
        """Refuse columns of another table."""
        model = self.source.model
        columns = {"path": self.path, "project": self.project}
        columns |= {"location": self.location.column} if isinstance(self.location, Locations) else {}
        for option, column in columns.items():
            if isinstance(column, pw.Field) and column.model is not model:
                raise Mistake(f"Objects of {model.__name__}: {option} has to be a column of {model.__name__}")
        if not isinstance(self.path, pw.Node):
            raise Mistake(f"Objects of {model.__name__}: path has to be a column or an expression of columns")
        if self.chunk < 1:
            raise Mistake(f"Objects of {model.__name__}: a chunk has one object at least, not {self.chunk}")
        record = self.record or record_of(model)
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "called", self.called or record)

    @property
    def locations(self) -> list[str]:
        """The names of all places where its objects may be."""
        return [self.location] if isinstance(self.location, str) else list(self.location.names.values())

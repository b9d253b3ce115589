"""`Objects`: objects in stores, named by the rows of a queue or the entries of a register.

The engine deletes the objects, and then the rows or entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar, overload

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.answers import (
    DEFAULT_OBJECTIVE,
    WHOLE_NUMBER_FIELDS,
    Answer,
    Mistake,
    default_record_name,
    require_table,
)
from forgekeeper.api.chunk_sizes import OBJECTS_PER_CHUNK
from forgekeeper.platform.database import Base

Row = TypeVar("Row", bound=Base)
Source = TypeVar("Source", bound="Base | Register")
REGISTER_NAME_PATTERN = re.compile("[a-z][a-z0-9_]*")
"""The name of a register, which is the hash tag of its keys."""
NO_OBJECT_PATH: Final = pw.SQL("null")
"""The path of objects if the entries of a register name them."""
REGISTER_RESULT = {"pending": "pending", "deleted": "deleted", "timed_out": "timed_out", "failed": "failed"}
"""Facts that a run on a register counts, each with the default name of its field in the result."""


class Retry(NamedTuple):
    """Pauses of a failed item: *first*, then twice as long each time; *attempts* in all.

    >>> retry = Retry(first=timedelta(minutes=5), attempts=3)
    """

    first: timedelta = timedelta(minutes=1)
    attempts: int = 10


DEFAULT_RETRY = Retry()
UPLOAD_RETRY = Retry(first=timedelta(minutes=6), attempts=5)
ONE_SECOND = timedelta(seconds=1)


@dataclass(frozen=True)
class Queue(Generic[Row]):
    """Rows of *model* as items of work; an item is due at *due_at*.

    A claim moves *due_at* ahead: if the worker dies, another one finds the row due then.  A failure moves it ahead by
    *retry* and counts in *attempts*; after the last attempt the row waits in quarantine for a person.  The audit
    stores *created_at* as the item's due time.  With an index on *due_at* and the key a claim is one index scan.

    Raises `Mistake` for columns of another type or table.

    >>> queue = Queue(Parcel, due_at=Parcel.due_at, attempts=Parcel.attempts, created_at=Parcel.created_at)
    """

    model: type[Row]
    _: KW_ONLY
    due_at: pw.Field[Any]
    attempts: pw.Field[Any]
    created_at: pw.Field[Any]
    retry: Retry = DEFAULT_RETRY

    def __post_init__(self) -> None:
        """Refuse columns that allow no claim."""
        name = require_table(self.model, "Queue")
        for option in ("due_at", "created_at", "attempts"):
            column, is_time = getattr(self, option), option != "attempts"
            kind = DateTimeTZField if is_time else pw.IntegerField
            if not isinstance(column, kind) or column.model is not self.model:
                wanted = "times (DateTimeTZField)" if is_time else "whole numbers (IntegerField)"
                raise Mistake(f"Queue of {name}: {option} has to be a column of {name} for {wanted}")
        if not isinstance(self.model._meta.primary_key, WHOLE_NUMBER_FIELDS):
            raise Mistake(f"Queue of {name}: its primary key has to be one column of whole numbers")
        if self.retry.attempts < 1:
            raise Mistake(f"Queue of {name}: an item has at least one attempt, not {self.retry.attempts}")


@dataclass(frozen=True)
class Register:
    """Uploads that have begun and not completed, in Redis: an entry ``<location>:<path>`` for each.

    A producer prepares an entry, uploads the object, and completes the entry.  An entry is due if it was prepared more
    than *older_than* ago by Redis's clock.  A failed deletion is tried again as *retry* says; after the last attempt
    the entry waits in quarantine for a person.  The keys begin with ``{name}:``.  With the setting
    ``FORGEKEEPER_UPLOADS_REGISTER=hash`` a run also reads the hash of that *name* that the forge itself registers
    uploads in.

    Raises `Mistake` for a name that cannot be a hash tag, and for a time that is not in whole seconds.

    >>> packages = Register("new_packages", older_than=timedelta(hours=3))
    """

    name: str
    _: KW_ONLY
    older_than: timedelta
    retry: Retry = UPLOAD_RETRY

    def __post_init__(self) -> None:
        """Refuse a register that Redis cannot keep."""
        said = f"Register {self.name!r}"
        if not REGISTER_NAME_PATTERN.fullmatch(self.name):
            raise Mistake(
                f"{said}: its name begins the keys: write lower-case letters, digits and _, as in new_uploads"
            )
        if self.older_than < ONE_SECOND or self.older_than % ONE_SECOND:
            raise Mistake(f"{said}: older_than has to be whole seconds, at least one, not {self.older_than}")
        if self.retry.attempts < 1:
            raise Mistake(f"{said}: an entry has at least one attempt, not {self.retry.attempts}")


class Locations(NamedTuple):
    """The location of each object by the value of a *column*.

    >>> location = Locations(Parcel.store, {1: "parcels_local", 2: "parcels"})
    """

    column: pw.Field[Any]
    names: Mapping[int, str]


class ObjectOwner(Protocol):
    """A table with rows that name objects at *locations*; *sentence* is the reason for keeping such an object."""

    locations: Sequence[str]
    sentence: str

    def named(self, paths: Sequence[str]) -> set[str]:
        """Return the *paths* that rows name."""


class NamedBy(NamedTuple):
    """Rows that keep objects: an object that the *owner* names stays, and its row is removed.

    If *unsure* names it, too, the row stays as well, as after a failure: only a person can know whose it is.  If the
    owner has a method ``sample(location)``, `check` looks for the objects at the paths that it returns.

    >>> unless = NamedBy(Label)
    """

    owner: Any
    unsure: Any = None


@dataclass(frozen=True)
class Objects(Answer, Generic[Source]):
    """Objects in stores, one for each due row of a queue, or for each due entry of a register: the *source*.

    *location* names the object's place in ``FORGEKEEPER_OBJECT_STORES``, or is the column that does, and *path* is the
    object's place in it.  People exclude objects by *project*, the column with its id, and by their paths.  An entry of
    a register has its location and path in itself, so these three are for a queue.  An object that rows of another
    table name is kept (*unless*).

    An object counts as deleted once its store has said so and its sentinel was read afterwards; then its row or entry
    is removed.  The audit records the intent before and the outcome after: if the process dies in between, the next run
    asks the store.  If one store does not answer, the objects of other stores are deleted, and then the run fails.

    *chunk* objects are claimed at a time, and may wait for *objective* after they are due.  *called* names
    an object in quarantine, *record* in metrics and audit; the default of both is the model's name, of a register
    ``upload`` and ``stale_upload``.  For a register *counted* maps ``pending``, ``deleted``, ``timed_out`` and
    ``failed`` to the names of these fields in the result, if they differ.
    *share* is the condition of a child's part of the rows.

    Raises `Mistake` for an option that the source does not allow, or that is not a column of the queue's table.

    >>> parcels = Objects(
    ...     Queue(Parcel, due_at=Parcel.due_at, attempts=Parcel.attempts, created_at=Parcel.created_at),
    ...     location="parcels",
    ...     path=Parcel.path,
    ...     unless=NamedBy(Label),
    ... )
    >>> uploads = Objects(Register("new_packages", older_than=timedelta(hours=3)))
    """

    source: Queue[Any] | Register
    _: KW_ONLY
    location: str | Locations = ""
    path: pw.Node = field(default_factory=lambda: NO_OBJECT_PATH)
    project: pw.Field[Any] | None = None
    unless: NamedBy | None = None
    chunk: int = OBJECTS_PER_CHUNK
    objective: timedelta = DEFAULT_OBJECTIVE
    called: str = ""
    record: str = ""
    share: pw.Node | None = None
    counted: Mapping[str, str] = field(default_factory=dict)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Objects[Row],
            source: Queue[Row],
            *,
            location: str | Locations,
            path: pw.Node,
            project: pw.Field[Any] | None = None,
            unless: NamedBy | None = None,
            chunk: int = 1_000,
            objective: timedelta = DEFAULT_OBJECTIVE,
            called: str = "",
            record: str = "",
            share: pw.Node | None = None,
        ) -> None: ...

        @overload
        def __init__(
            self: Objects[Register],
            source: Register,
            *,
            unless: NamedBy | None = None,
            chunk: int = 1_000,
            objective: timedelta = DEFAULT_OBJECTIVE,
            called: str = "",
            record: str = "",
            counted: Mapping[str, str] = ...,
        ) -> None: ...

        def __init__(self, source: Any, **facts: Any) -> None: ...

    def __post_init__(self) -> None:
        """Refuse options that the source does not allow, and columns of another table."""
        if self.unless is not None and not isinstance(self.unless, NamedBy):
            raise Mistake(f"{self._shown_name}: unless has to be NamedBy(MODEL)")
        if isinstance(self.source, Register):
            self._require_no_columns()
        else:
            self._require_columns(self.source.model)
        if self.chunk < 1:
            raise Mistake(f"{self._shown_name}: a chunk has at least one object, not {self.chunk}")
        in_register = isinstance(self.source, Register)
        called = self.called or ("upload" if in_register else self.record or default_record_name(self.queue.model))
        record = self.record or (f"stale_{called}" if in_register else default_record_name(self.queue.model))
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "called", called)

    def _require_no_columns(self) -> None:
        given = {
            "location": self.location != "",
            "path": self.path is not NO_OBJECT_PATH,
            "project": self.project is not None,
        }
        if columns := [f"{option}=" for option, is_given in given.items() if is_given]:
            raise Mistake(
                f"{self._shown_name}: an entry contains its location and path; leave out {', '.join(columns)}"
            )
        if self.unless is not None and self.unless.unsure is not None:
            raise Mistake(f"{self._shown_name}: unsure= keeps rows of a queue; leave it out")
        if unknown := sorted(self.counted.keys() - REGISTER_RESULT.keys()):
            raise Mistake(f"{self._shown_name}: counted= lacks {unknown[0]!r}, and has {', '.join(REGISTER_RESULT)}")

    def _require_columns(self, model: type[Base]) -> None:
        if not isinstance(self.location, (str, Locations)):
            raise Mistake(f"{self._shown_name}: location has to be a name or Locations(COLUMN, NAMES)")
        if not self.location or self.path is NO_OBJECT_PATH:
            raise Mistake(f"{self._shown_name}: name the object of a row with location= and path=")
        if self.counted:
            raise Mistake(f"{self._shown_name}: counted= is for a register; leave it out")
        columns = {"path": self.path, "project": self.project}
        columns |= {"location": self.location.column} if isinstance(self.location, Locations) else {}
        for option, column in columns.items():
            if isinstance(column, pw.Field) and column.model is not model:
                raise Mistake(f"{self._shown_name}: {option} has to be a column of {model.__name__}")
        if self.project is not None and not isinstance(self.project, WHOLE_NUMBER_FIELDS):
            raise Mistake(f"{self._shown_name}: project has to be a column with the ids of projects")
        is_text = not isinstance(self.path, pw.Field) or isinstance(self.path, (pw.TextField, pw.CharField))
        if not isinstance(self.path, pw.Node) or not is_text:
            raise Mistake(f"{self._shown_name}: path has to be a text column or an expression of columns")

    @property
    def _shown_name(self) -> str:
        return f"Objects of {self.source.name if isinstance(self.source, Register) else self.source.model.__name__}"

    @property
    def queue(self) -> Queue[Any]:
        """The source, if it is a queue."""
        assert isinstance(self.source, Queue), "the caller has a queue"
        return self.source

    @property
    def register(self) -> Register:
        """The source, if it is a register."""
        assert isinstance(self.source, Register), "the caller has a register"
        return self.source

    @property
    def locations(self) -> list[str]:
        """The names of all locations that the objects of a queue may have."""
        return [self.location] if isinstance(self.location, str) else list(self.location.names.values())

    @property
    def result_fields(self) -> dict[str, str]:
        """The names of the result's fields, by the facts of `REGISTER_RESULT`."""
        return REGISTER_RESULT | dict(self.counted)

"""Answers of a batch, except `Objects` and `Refs`, and the numbers of due rows before a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from json import dumps
from typing import Any, Generic, NamedTuple, Self, TypeVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.api.buckets import Buckets
from forgekeeper.api.mistakes import Mistake as Mistake  # noqa: PLC0414, imported from here by others
from forgekeeper.api.row_objects import RowObject
from forgekeeper.platform.database import Base, database, exclusions, queries
from forgekeeper.platform.database.cascades import Cascades
from forgekeeper.platform.database.naming import column_name, quote_name, relation_name
from forgekeeper.platform.database.targets import Target
from forgekeeper.platform.settings import Settings

Row = TypeVar("Row", bound=Base)
WHOLE_NUMBERS = (pw.IntegerField, pw.BigIntegerField, pw.AutoField, pw.BigAutoField)
AT_ONCE = timedelta(0)
AN_HOUR = timedelta(hours=1)
WORD = re.compile("(?<=[a-z0-9])(?=[A-Z])")
Keyed = tuple[str, tuple[Any, ...]]
"""A message's key and the child's arguments: ids, as JSON has them."""


class Answer:
    """What a batch may return or yield."""


Due = Callable[[datetime], "Answer | Iterable[Answer]"]


class Total(NamedTuple):
    """A sum of the rows' sizes that another table keeps in the column *kept*, in a row for each value of *of*.

    The deletion takes its bytes off in the same statement.  A sum that somebody else has locked is not waited for: the
    rows that count towards it stay for a later run; all others are deleted, also rows that count towards no sum.

    >>> totals = Total(Project.pipeline_bytes, of=Pipeline.project_id)
    >>> pipelines = Rows(
    ...     Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365), size=Pipeline.bytes, total=totals
    ... )
    """

    kept: pw.Field[Any]
    of: pw.Field[Any]

    @property
    def table(self) -> str:
        """The other table, in SQL."""
        return relation_name(self.kept.model)

    @property
    def key(self) -> str:
        """The column of its key, in SQL."""
        return quote_name(self.kept.model._meta.primary_key.column_name)


@dataclass(frozen=True)
class Classes:
    """Equal parts of a table: the *number* of a row's class in SQL, from 0 to below *count*.

    An index that begins with this expression and continues with *since* and the key makes each class one index scan.

    >>> classes = Classes("mod(project_id, 8)", 8)
    """

    number: str
    count: int

    def only(self, number: int) -> pw.SQL:
        """Return the condition of the rows of a class."""
        return pw.SQL(f"{self.number} = %s", [number])

    def every(self) -> pw.SQL:
        """Return the condition that all rows meet: with it PostgreSQL uses the index that begins with the class."""
        return pw.SQL(f"{self.number} = any(%s)", [list(range(self.count))])


class Spared(NamedTuple):
    """Rows that stay for now, for a *reason* that the preview shows: *where* is their condition, by what *model* says.

    Where the forge has no relation of that model it spares nothing.

    >>> its_project = Project.select().where(Project.id == Pipeline.project_id, Project.locked)
    >>> locked = Spared("project_locked", Project, fn.EXISTS(its_project))
    >>> pipelines = Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365), spared=[locked])
    """

    reason: str
    model: type[Base]
    where: pw.Node


class Recoverable(NamedTuple):
    """Numbers of deleted records: *looked_at*, and *recoverable* among these; the *obstacle* if none can come back."""

    recoverable: int
    looked_at: int
    obstacle: str | None = None


class Subject(NamedTuple):
    """A kind of record as people ask the audit for it: ``CALLED:ID``, or ``CALLED:WITHIN:NAME`` if they know no id.

    *name* is the column of the audit's detail with the record's name, *within* the column with the name's owner.
    Without a *record* the subject matches each record with that name.  *because* ends the sentence on why the record
    was due.  *restore* is the command that restores it, *restore_run* the command for all deletions of a ``run``.
    *because* and *restore* are formatted with the detail's columns, *restore* also with ``id``.  *gone* says what
    happened to the record, *done* says it in one word.  *undone* is a sentence on how to undo the deletion, *obstacle*
    returns why nobody can here, and *kept* names the setting for how long.  *count_recoverable* counts the records of a
    run that can be restored, until an instant of the monotonic clock.  *is_there* returns whether the forge has a
    record with an id now.

    >>> subject = Subject("pipeline", "ID", "pipeline", because="nothing had touched it since {due}")
    >>> pipelines = Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365), called=subject)
    """

    called: str
    argument: str
    record: str | None
    batch: str | None = None
    name: str | None = None
    within: str | None = None
    gone: str = "was deleted"
    done: str = "deleted"
    because: str = ""
    restore: str = ""
    restore_run: str = ""
    undone: str = ""
    obstacle: Callable[[], str | None] | None = None
    kept: str = ""
    count_recoverable: Callable[[int, float, Settings], Recoverable] | None = None
    is_there: Callable[[int], bool] | None = None

    @property
    def usage(self) -> str:
        """The form in which people ask for it."""
        return f"{self.called}:{self.argument}"


@dataclass(frozen=True)
class Rows(Answer, Generic[Row]):
    """Rows of *model* that are due; the engine deletes them in chunks, the oldest *since* first.

    A row is due if its *since*, a `DateTimeTZField`, is older than *older_than* and if it meets the condition *where*;
    write at least one.  A row whose *since* is NULL is never due.  Backlog, preview and audit count a row from
    when it became due.  With an index on *since* and the key each chunk is one index scan.

    >>> Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365))

    *or_where* is the condition of more rows, with an index of their own; if the forge lacks the relation of
    *or_needs*, these rows stay.  With *classes* a chunk has rows of one class; children that work in `Buckets`
    share the classes.

    *chunk* rows go in a transaction; rows that others have locked stay for a later run.  *objective* says how long a
    due row may wait; None is for records of forgekeeper's own, which limits and brakes do not count.  *share* narrows
    them down to a child's part.  *until* is asked after each chunk; what it returns is why the run has to end.

    *record* is what such a row is called in metrics, audit and previews: the model's name in small letters.  *counted*
    is the field of the result that counts them, *verb* what the preview says that becomes of them.  *name* is what it
    shows and people look for in the audit besides the id, *called* how they ask for it there, *audit* what else that
    keeps of each row: names, each with an expression of SQL.  If rows are *restorable*, the audit keeps each other
    column of the relation, too.  *project* and *size* (bytes) let the preview group and add up; with *size*,
    *counted_bytes* names the field of the result, and bytes have limits, too.

    Rows are *spared* for as long as what is declared there is true.  People exclude projects and groups by *project*,
    and patterns by *name*; the engine says which *batch* that is of.  *stays* has conditions in SQL, by the reasons, of
    rows whose time has passed and that do not meet *where*: previews count them.  *waits* has conditions of rows that
    stay until the forge says more of them: the exporter counts them, too, if an index makes that quick.

    Foreign keys may delete or change rows of other tables with these, or more rows of this one: *cascades_to* names the
    models of those tables.  They count towards limits and the breaker, and are audited.  If a key leads to another
    table, the batch is blocked.  If they are a part of the row (*shows_followers* is false), the result does not count
    them by themselves, and the audit is not asked for them.

    *also* are statements, without ``returning``, that go with each chunk: all or nothing.  They read its part
    ``deleted``, which has the columns of the model.  The *outbox* gets the objects that the rows name.  *total* is a
    sum of the sizes: each chunk takes its bytes off.

    Raises `Mistake` for a model, *since*, *where*, *chunk* or *total* that allows no deletion in chunks.
    """

    model: type[Row]
    where: pw.Node | None = None
    _: KW_ONLY
    since: pw.Field[Any]
    older_than: timedelta | None = None
    chunk: int = 100
    objective: timedelta | None = AN_HOUR
    record: str = ""
    counted: str = "deleted"
    name: pw.Field[Any] | None = None
    called: Subject | None = None
    audit: Mapping[str, str] = field(default_factory=dict)
    restorable: bool = False
    project: pw.Field[Any] | None = None
    size: pw.Field[Any] | None = None
    counted_bytes: str | None = None
    or_where: pw.Node | None = None
    or_needs: type[Base] | None = None
    classes: Classes | None = None
    share: pw.Node | None = None
    cascades_to: Sequence[type[Base]] = ()
    shows_followers: bool = True
    also: Sequence[pw.SQL] = ()
    outbox: RowObject | None = None
    total: Total | None = None
    until: Callable[[], str | None] | None = None
    verb: str = "deleted"
    spared: Sequence[Spared] = ()
    stays: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    batch: str | None = None
    now: datetime | None = None

    def __post_init__(self) -> None:
        """Refuse what could not be deleted in chunks."""
        name, key = require_table(self.model, "Rows"), self.model._meta.primary_key
        if not isinstance(key, WHOLE_NUMBERS):
            raise Mistake(f"Rows of {name}: its primary key has to be one column of whole numbers")
        if not isinstance(self.since, DateTimeTZField) or self.since.model is not self.model:
            raise Mistake(f"Rows of {name}: since has to be a DateTimeTZField of {name}, as {name}.created_at may be")
        if self.where is None and self.older_than is None:
            raise Mistake(f"Rows of {name}: nothing says which are due; write older_than=, a condition, or both")
        if self.where is not None and not isinstance(self.where, pw.Node):
            raise Mistake(f"Rows of {name}: the condition has to be an expression, as {name}.created_at < now is")
        self._check_parts(name)
        if self.chunk < 1:
            raise Mistake(f"Rows of {name}: a chunk has one row at least, not {self.chunk}")
        if self.total is not None and self.size is None:
            raise Mistake(f"Rows of {name}: a total is kept of sizes, so size has to be a column")
        if not self.record:
            object.__setattr__(self, "record", record_of(self.model))
        if self.classes is not None and self.share is None:
            object.__setattr__(self, "share", self.classes.every())

    def _check_parts(self, name: str) -> None:
        """Refuse a second condition without a first, an outbox of another table, and a table without a class."""
        if self.or_where is not None and self.where is None:
            raise Mistake(f"Rows of {name}: or_where= adds to a condition; write that, too")
        if self.outbox is not None and self.outbox.path.model is not self.model:
            raise Mistake(f"Rows of {name}: the outbox gets a path, which has to be a column of {name}")
        if self.classes is not None and self.classes.count < 1:
            raise Mistake(f"Rows of {name}: there is one class at least, not {self.classes.count}")

    def in_class(self, number: int) -> Self:
        """Return the rows of a class."""
        assert self.classes is not None, "rows without classes"
        return replace(self, share=self.classes.only(number))

    def by_index(self) -> list[Self]:
        """Return the rows apart for each condition that has an index of its own.  Asks the database for `or_needs`."""
        if self.or_where is None:
            return [self]
        if self.or_needs is not None and not exclusions.visible(self.or_needs):
            return [replace(self, or_where=None)]
        return [replace(self, where=where, or_where=None) for where in (self.where, self.or_where)]

    def within(self, whole: Rows[Any]) -> Self:
        """Return those that are among the *whole*, too: a share of it."""
        spared = (*whole.spared, *self.spared)
        return replace(self, where=whole.where, older_than=whole.older_than, share=self.looks_due, spared=spared)

    def bind(self, batch: str, now: datetime) -> Self:
        """Return the same as rows of that batch at that instant: its exclusions hold, and age is counted from then.

        A total that the forge lacks, which an `optional` model says is allowed, is left out.  Asks the database.
        """
        model = None if self.total is None else self.total.kept.model
        is_missing = model is not None and model.optional and not exclusions.visible(model)
        return replace(self, batch=batch, now=now, total=None if is_missing else self.total)

    @property
    def grants(self) -> str:
        """The privileges that processes need on the relation; to lock a row its key has to be updatable."""
        (key,) = self.model._meta.get_primary_keys()
        return f"worker: select, update ({key.column_name}), delete; exporter: select"

    @property
    def after(self) -> timedelta:
        """How long after its *since* a row is due."""
        return self.older_than or AT_ONCE

    @property
    def condition(self) -> pw.Node:
        """The condition of the rows of all shares: old enough, and *where*.  Needs `bind` before."""
        where = self.where
        if where is not None and self.or_where is not None:
            where = pw.Expression(where, "OR", self.or_where)
        if self.older_than is None:
            assert where is not None, "Rows has one of both"
            return where
        assert self.now is not None, "rows have to be bound to an instant"
        is_old: pw.Node = self.since < self.now - self.older_than
        return is_old if where is None else pw.Expression(is_old, "AND", where)

    @property
    def looks_due(self) -> pw.Node:
        """The condition of those that go, unless something keeps them: of the share, if they are one."""
        return self.condition if self.share is None else pw.Expression(self.condition, "AND", self.share)

    @cached_property
    def kept(self) -> dict[str, pw.Node]:
        """Why some stay that look due, and the condition of each: what is excluded, what is spared.  Asks the database.

        That says which relations there are.
        """
        spared = {one.reason: one.where for one in self.spared if exclusions.visible(one.model)}
        if self.project is None and self.name is None:
            return spared
        return {exclusions.REASON: exclusions.excluded(self.batch, project=self.project, name=self.name)} | spared

    def written(self) -> dict[str, str]:
        """Return the same in SQL, the values in it."""
        return {reason: exclusions.written(self.model, kept) for reason, kept in self.kept.items()}

    @property
    def due(self) -> pw.Node:
        """The condition of those that go."""
        return self._without_kept(self.looks_due)

    @property
    def due_of_all_shares(self) -> pw.Node:
        """The condition of those that go, of all shares."""
        return self._without_kept(self.condition)

    def _without_kept(self, found: pw.Node) -> pw.Node:
        for kept in self.kept.values():
            found = pw.Expression(found, "AND", exclusions.but(kept))
        return found

    def select(self, *columns: Any) -> pw.ModelSelect[Row]:
        """Select them all, whatever is locked or passed over."""
        return self.model.select(*columns).where(self.due, self.since.is_null(False))

    @property
    def stay_reasons(self) -> dict[str, str]:
        """The reasons why rows stay whose time has passed, with their conditions."""
        return dict(self.stays) | dict(self.waits)

    @property
    def shown_followers(self) -> Sequence[type[Base]]:
        """The models of the rows that follow these and that people see by themselves."""
        return self.cascades_to if self.shows_followers else ()

    @cached_property
    def cascades(self) -> Cascades:
        """The rows that foreign keys delete or change with these.  Asks the database."""
        return Cascades.find(Target.find(self.model), self.cascades_to)

    @property
    def followers(self) -> list[type[Base]]:
        """The models, other than this one, of the rows that are counted with these.  Asks the database."""
        return [self.cascades.models[place] for place in self.cascades.followers if place] if self.cascades_to else []

    def count(self, bound: int) -> dict[int, int]:
        """Count them, and what follows by foreign keys, up to *bound* in all: by the places of ``cascades.models``."""
        (key,) = self.model._meta.get_primary_keys()
        if not self.cascades_to or not self.cascades.links:
            return {0: self.select(key).limit(bound).count()}
        where = exclusions.written(self.model, pw.Expression(self.due, "AND", self.since.is_null(False)))
        statement = self.cascades.counting(column_name(key), where, limit="%(bound)s")
        return dict(database.execute_sql(statement, {"bound": bound}).fetchall())

    def select_of_all_shares(self) -> pw.ModelSelect[Row]:
        """Select them, and those of the other shares."""
        return self.model.select().where(self.condition, self.since.is_null(False))


@dataclass(frozen=True)
class Changes(Rows[Row]):
    """Rows that are changed by the document's own *statement*, a page of them at a time, instead of being deleted.

    The statement names the page's keys ``%(ids)s``, the run's time ``%(now)s`` and the condition ``{due}``, has a part
    ``changed`` that returns a row for each that was changed, its key called ``id``, and says ``{recorded}`` behind its
    last part: there the engine writes the audit and counts.  It repeats the condition where it changes rows, so that
    rows that move on meanwhile stay.  Raises `Mistake` if the statement lacks any of these.

    *each* is called with each row of ``changed`` after the commit: it may log it, and returns what it counts.  The
    audit keeps what *audit* says, over ``changed``.  Fields ``skipped`` and ``failed`` of the result count rows that
    moved on, and bad ones.  With *notice*, names with expressions of SQL over ``changed``, each changed row leaves a
    row with this detail in the table ``notices``, which the forge's own programs read and delete.

    >>> TIME_OUT = \"\"\"
    ...     with changed as (
    ...         update pipeline set status = 4 where id = any(%(ids)s) and {due} returning id
    ...     ){recorded}
    ...     select id from changed
    ... \"\"\"
    >>> timed_out = Changes(
    ...     Pipeline,
    ...     Pipeline.status == 1,
    ...     since=Pipeline.updated_at,
    ...     older_than=timedelta(days=1),
    ...     statement=TIME_OUT,
    ...     each=lambda row: {},
    ... )
    """

    _: KW_ONLY
    statement: str
    each: Callable[[tuple[Any, ...]], Mapping[str, int]]
    verb: str = "changed"
    notice: Mapping[str, str] = field(default_factory=dict)

    @property
    def grants(self) -> str:
        """The privileges that processes need on the relation: of the columns only the statement knows."""
        return "worker: select, update; exporter: select"

    def __post_init__(self) -> None:
        """Refuse a statement that the engine could not record."""
        super().__post_init__()
        for part in ("%(ids)s", "{due}", "{recorded}", "changed as"):
            if part not in self.statement:
                raise Mistake(f"Changes of {self.record}: its statement has no {part}")


@dataclass(frozen=True)
class Enqueued:
    """How many were put in, how many were on their way already or skipped by a hook, and whether we stopped early."""

    enqueued: int = 0
    deduplicated: int = 0
    queue_full: bool = False


@dataclass(frozen=True)
class Children(Answer):
    """A message to *child* for each of *of*, unless one with its key is on its way already.

    *of* are ids, one a child, or tuples of arguments as JSON has them; or a mapping of keys to such tuples, for
    children whose arguments are not unique.  To send a child twice is harmless, and to lose it costs time alone.
    Of `Buckets` each gets a child.  *sent* names the field of the result that counts them, *all_of* a field that counts
    those on their way, too.  If the first argument of each is a project's id (*by_project*), a project that is excluded
    gets none.

    >>> @batch(cron="0 * * * *", budget=timedelta(minutes=1), records=(), outcome=Counted)
    ... def start_shards(now: datetime) -> Children:
    ...     \"\"\"Start a child for each of four shards.\"\"\"
    ...     return Children(delete_shard, range(4))
    >>> @child(start_shards, queue="shards", budget=timedelta(minutes=5), due=find_stale)
    ... def delete_shard(now: datetime, shard: int) -> Rows[Pipeline]:
    ...     \"\"\"Delete the stale pipelines of a shard.\"\"\"
    ...     return Rows(Pipeline, Pipeline.project_id % 4 == shard, since=Pipeline.updated_at)
    """

    child: Any
    of: Iterable[Any] | Mapping[str, tuple[Any, ...]] | Buckets
    _: KW_ONLY
    sent: str = "children_enqueued"
    all_of: str | None = None
    by_project: bool = False

    def calls(self) -> Iterator[Keyed]:
        """Yield the key and the arguments of each."""
        if isinstance(self.of, Buckets):
            said = f"buckets {self.of.name} that their batch does not declare: write buckets= in @batch, too"
            raise Mistake(f"{self.child.name} is sent for the {said}")
        if isinstance(self.of, Mapping):
            pairs: Iterable[Keyed] = self.of.items()
        else:
            tuples = (one if isinstance(one, tuple) else (one,) for one in self.of)
            # As JSON: ("a:b", "c") and ("a", "b:c"), 7 and "7" are different children.
            pairs = ((":".join(map(dumps, arguments)), arguments) for arguments in tuples)
        for key, arguments in pairs:
            yield f"{self.child.name}:{key}", arguments


@dataclass(frozen=True)
class Skip(Answer):
    """The run does nothing, for a *reason* that result, log and metrics show: one of `metrics.catalogue.SKIPS`.

    >>> @batch(cron="0 * * * *", budget=timedelta(minutes=1))
    ... def pipelines_at_night(now: datetime) -> Rows[Pipeline] | Skip:
    ...     \"\"\"Delete stale pipelines, but not in office hours.\"\"\"
    ...     if 8 <= now.hour < 18:
    ...         return Skip("paused")
    ...     return Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365))
    """

    reason: str


class Note(Answer):
    """Fields of the result that the batch itself knows; the run raises `Mistake` for a field that its outcome lacks.

    >>> @batch(cron="0 * * * *", budget=timedelta(minutes=1), records=(), outcome=Counted)
    ... def count_pipelines(now: datetime) -> Iterator[Note]:
    ...     \"\"\"Note how many pipelines there are.\"\"\"
    ...     yield Note(pipelines=Pipeline.select().count())
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class Backlog(NamedTuple):
    """How many records are due, at most `queries.BOUND`, and when the oldest became due."""

    records: int
    oldest: datetime | None = None

    @classmethod
    def of(cls, query: pw.ModelSelect[Any], *, oldest: pw.Field[Any], after: timedelta = AT_ONCE) -> Backlog:
        """Count what *query* selects; each became due at the instant in that field, or so much *after* it.

        Without an order the oldest is that of those which were counted.
        """
        found = query.select(oldest.alias("due")).limit(queries.BOUND)
        row = pw.Select([found], [pw.fn.count(pw.SQL("1")), pw.fn.min(found.c.due)]).bind(database).tuples().execute()
        records, instant = row[0]
        return cls(records, instant and instant + after)


def answers_of(name: str, due: Due, now: datetime) -> list[Answer]:
    """Return what the batch answers with at an instant; raise `Mistake` for an answer that is none."""
    answer = due(now)
    answers = [answer] if isinstance(answer, Answer) or answer is None else list(answer)
    for one in answers:
        if not isinstance(one, Answer):
            raise Mistake(f"{name} answers with {one!r}: return Rows, Objects, Refs, Children or Skip")
    return answers


def rows_of(batch: str, due: Due, now: datetime) -> list[Rows[Any]]:
    """Return the rows of the batch that are due at an instant; raise `Mistake` for an answer that is none."""
    return [one.bind(batch, now) for one in answers_of(batch, due, now) if isinstance(one, Rows)]


def require_table(model: Any, answer: str) -> str:
    """Return the name of a *model*; raise `Mistake` unless it is a class that inherits from `Table`."""
    if not (isinstance(model, type) and issubclass(model, Base)):
        raise Mistake(f"{answer} of {model!r}: it takes a class that inherits from forgekeeper.Table")
    return model.__name__


def record_of(model: type[Base]) -> str:
    """Return what a row of *model* is called in metrics, audit and previews, unless its batch says otherwise."""
    return WORD.sub("_", model.__name__).lower()

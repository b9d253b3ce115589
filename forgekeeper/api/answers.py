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
from forgekeeper.api.chunk_sizes import ROWS_PER_CHUNK
from forgekeeper.api.mistakes import Mistake as Mistake  # noqa: PLC0414, imported from here by others
from forgekeeper.api.row_objects import RowObject
from forgekeeper.platform.database import Base, database, exclusions, queries
from forgekeeper.platform.database.cascades import Cascades
from forgekeeper.platform.database.naming import column_name, quote_name, relation_name
from forgekeeper.platform.database.targets import TargetRelation
from forgekeeper.platform.settings import Settings

Row = TypeVar("Row", bound=Base)
WHOLE_NUMBER_FIELDS = (pw.IntegerField, pw.BigIntegerField, pw.AutoField, pw.BigAutoField)
NO_DELAY = timedelta(0)
DEFAULT_OBJECTIVE = timedelta(hours=1)
WORD_BOUNDARY = re.compile("(?<=[a-z0-9])(?=[A-Z])")
KeyedArguments = tuple[str, tuple[Any, ...]]
"""A message's key and the child's arguments: ids, as JSON has them."""


class Answer:
    """Base class of the values that a batch may return or yield."""


DueFunction = Callable[[datetime], "Answer | Iterable[Answer]"]


class Total(NamedTuple):
    """A sum of the rows' sizes in the column *kept* of another table, a sum for each value of *of*.

    The statement that deletes rows subtracts their bytes, too.  If another session has locked a sum, the engine does
    not wait: the rows that count towards it stay for a later run.  All other rows are deleted, also rows that count
    towards no sum.

    >>> totals = Total(Project.pipeline_bytes, of=Pipeline.project_id)
    >>> pipelines = Rows(
    ...     Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365), size=Pipeline.bytes, total=totals
    ... )
    """

    kept: pw.Field[Any]
    of: pw.Field[Any]

    @property
    def table_sql(self) -> str:
        """The other table, in SQL."""
        return relation_name(self.kept.model)

    @property
    def key_sql(self) -> str:
        """The column of its key, in SQL."""
        return quote_name(self.kept.model._meta.primary_key.column_name)


@dataclass(frozen=True)
class Classes:
    """Equal parts of a table: *number* is a row's class in SQL, from 0 to *count* - 1.

    An index that begins with this expression and continues with *since* and the key makes each class one index scan.

    >>> classes = Classes("mod(project_id, 8)", 8)
    """

    number: str
    count: int

    def class_condition(self, number: int) -> pw.SQL:
        """Return the condition of the rows of a class."""
        return pw.SQL(f"{self.number} = %s", [number])

    def all_classes_condition(self) -> pw.SQL:
        """Return a condition that all rows meet, so that PostgreSQL uses the index by class."""
        return pw.SQL(f"{self.number} = any(%s)", [list(range(self.count))])


class Kept(NamedTuple):
    """Rows that stay for now because they meet the condition *where*, which reads *model*.

    The preview shows the *reason*.  If the forge lacks the relation of *model*, no row is kept by it.

    >>> its_project = Project.select().where(Project.id == Pipeline.project_id, Project.locked)
    >>> locked = Kept("project_locked", Project, fn.EXISTS(its_project))
    >>> pipelines = Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365), kept=[locked])
    """

    reason: str
    model: type[Base]
    where: pw.Node


class Recoverable(NamedTuple):
    """Numbers of deleted records: *looked_at*, and how many of them are *recoverable*.

    *obstacle* says why none can be restored.
    """

    recoverable: int
    looked_at: int
    obstacle: str | None = None


class Subject(NamedTuple):
    """A kind of record that people ask the audit for: ``CALLED:ID``, or ``CALLED:WITHIN:NAME``.

    The second form is for people who know no id.  *name* is the column of the audit's detail with the record's name,
    *within* the column with the name's owner.  Without a *record* the subject matches each record with that name.
    *because* ends the sentence on why the record was due.  *restore* is the command that restores it, *restore_run* the
    command for all deletions of a ``run``.  *because* and *restore* are formatted with the detail's columns, *restore*
    also with ``id``.  *gone* says what happened to the record, *done* says it in one word.  *undone* is a sentence on
    how to undo the deletion, *obstacle* returns why nobody can here, and *kept* names the setting for how long.
    *count_recoverable* counts the records of a run that can be restored, until an instant of the monotonic clock.
    *is_there* returns whether the forge has a record with an id now.

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
        """The form of a question for such a record: ``CALLED:ARGUMENT``."""
        return f"{self.called}:{self.argument}"


@dataclass(frozen=True)
class Rows(Answer, Generic[Row]):
    """Rows of *model* that are due; the engine deletes them in chunks, the oldest *since* first.

    A row is due if its *since*, a `DateTimeTZField`, is older than *older_than* and if it meets the condition *where*;
    write one or both.  A row whose *since* is NULL is never due.  Backlog, preview and audit count a row
    from the time when it became due.  With an index on *since* and the key each chunk is one index scan.

    >>> Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365))

    *or_where* is the condition of more rows, with an index of their own; if the forge lacks the relation of *or_needs*,
    these rows stay.  With *classes* a chunk has rows of one class; children that work in `Buckets` share the classes.

    A transaction deletes *chunk* rows; rows that other sessions have locked stay for a later run.  *objective* is the
    longest time that a due row may wait; None is for records of forgekeeper's own, which limits and guards do not
    count.  *share* narrows the rows down to a child's part.  The engine calls *until* after each chunk; if it returns a
    reason, the run ends.

    *record* is the name of such a row in metrics, audit and previews, by default the model's name in small letters.
    *counted* is the field of the result that counts the rows, *verb* the preview's word for the deletion.  *name* is
    the column with the row's name: previews show it, and people look for it in the audit, as for the id.  *called* says
    how they ask for the row there.  *audit* names expressions of SQL that the audit keeps of each row, too.  If rows
    are *restorable*, the audit also keeps each other column of the relation.  *project* and *size* (bytes) let the
    preview group and add up; with *size*, *counted_bytes* names the field of the result, and bytes have limits, too.

    Rows are *kept* while a condition declared there holds.  People exclude projects and groups by *project*, and
    patterns by *name*; the engine sets the *batch* of the exclusions.  *stays* has conditions in SQL, by the reasons,
    of rows whose time has passed and that do not meet *where*: previews count them.  *waits* has conditions of rows
    that are kept until the forge updates them: the exporter counts them, too, if an index makes that quick.

    Foreign keys may delete or change rows of other tables with these, or more rows of this table: *cascades_to* names
    the models of those tables.  Such rows count towards limits and the breaker, and are audited.  If a key leads to
    another table, the batch is blocked.  If they are a part of the row (*shows_followers* is false), the result does
    not count them separately, and people cannot ask the audit for them.

    *also* are statements, without ``returning``, that run with each chunk: all or nothing.  They read its part
    ``deleted``, which has the columns of the model.  The *outbox* gets the objects that the rows name.  *total* is a
    sum of the sizes: each chunk subtracts its bytes.

    Raises `Mistake` for a model, *since*, *where*, *chunk* or *total* that allows no deletion in chunks.
    """

    model: type[Row]
    where: pw.Node | None = None
    _: KW_ONLY
    since: pw.Field[Any]
    older_than: timedelta | None = None
    chunk: int = ROWS_PER_CHUNK
    objective: timedelta | None = DEFAULT_OBJECTIVE
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
    kept: Sequence[Kept] = ()
    stays: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    batch: str | None = None
    now: datetime | None = None

    def __post_init__(self) -> None:
        """Refuse rows that cannot be deleted in chunks."""
        name, key = require_table(self.model, "Rows"), self.model._meta.primary_key
        if not isinstance(key, WHOLE_NUMBER_FIELDS):
            raise Mistake(f"Rows of {name}: its primary key has to be one column of whole numbers")
        if not isinstance(self.since, DateTimeTZField) or self.since.model is not self.model:
            raise Mistake(f"Rows of {name}: since has to be a DateTimeTZField of {name}, such as {name}.created_at")
        if self.where is None and self.older_than is None:
            raise Mistake(f"Rows of {name}: which rows are due is unknown; write older_than=, a condition, or both")
        if self.where is not None and not isinstance(self.where, pw.Node):
            raise Mistake(f"Rows of {name}: the condition has to be an expression, such as {name}.created_at < now")
        self._check_parts(name)
        if self.chunk < 1:
            raise Mistake(f"Rows of {name}: a chunk has at least one row, not {self.chunk}")
        if self.total is not None and self.size is None:
            raise Mistake(f"Rows of {name}: total= adds up sizes, so size has to be a column")
        if not self.record:
            object.__setattr__(self, "record", default_record_name(self.model))
        if self.classes is not None and self.share is None:
            object.__setattr__(self, "share", self.classes.all_classes_condition())

    def _check_parts(self, name: str) -> None:
        """Refuse a second condition without a first, an outbox of another table, and a table without a class."""
        if self.or_where is not None and self.where is None:
            raise Mistake(f"Rows of {name}: or_where= adds to a condition; write the condition, too")
        if self.outbox is not None and self.outbox.path.model is not self.model:
            raise Mistake(f"Rows of {name}: the path of the outbox has to be a column of {name}")
        if self.classes is not None and self.classes.count < 1:
            raise Mistake(f"Rows of {name}: count has to be at least 1, not {self.classes.count}")

    def in_class(self, number: int) -> Self:
        """Return the rows of a class."""
        assert self.classes is not None, "rows without classes"
        return replace(self, share=self.classes.class_condition(number))

    def split_by_index(self) -> list[Self]:
        """Return the rows of *where* and of *or_where* apart, as each condition has an index.

        Asks the database for `or_needs`.
        """
        if self.or_where is None:
            return [self]
        if self.or_needs is not None and not exclusions.is_visible(self.or_needs):
            return [replace(self, or_where=None)]
        return [replace(self, where=where, or_where=None) for where in (self.where, self.or_where)]

    def restrict_to(self, whole: Rows[Any]) -> Self:
        """Return the rows that are also among the *whole*: a share of it."""
        kept = (*whole.kept, *self.kept)
        return replace(self, where=whole.where, older_than=whole.older_than, share=self.looks_due, kept=kept)

    def bind(self, batch: str, now: datetime) -> Self:
        """Return the rows of *batch* at *now*: its exclusions apply, and ages are counted until then.

        A total that the forge lacks, as its `optional` model allows, is left out.  Asks the database.
        """
        model = None if self.total is None else self.total.kept.model
        is_missing = model is not None and model.optional and not exclusions.is_visible(model)
        return replace(self, batch=batch, now=now, total=None if is_missing else self.total)

    @property
    def grants(self) -> str:
        """The privileges that processes need on the relation; to lock a row its key has to be updatable."""
        (key,) = self.model._meta.get_primary_keys()
        return f"worker: select, update ({key.column_name}), delete; exporter: select"

    @property
    def due_delay(self) -> timedelta:
        """Time from a row's *since* until it is due."""
        return self.older_than or NO_DELAY

    @property
    def condition_of_all_shares(self) -> pw.Node:
        """The condition of the rows of all shares: old enough, and *where*.  Needs `bind` before."""
        where = self.where
        if where is not None and self.or_where is not None:
            where = pw.Expression(where, "OR", self.or_where)
        if self.older_than is None:
            assert where is not None, "Rows has a condition or an age"
            return where
        assert self.now is not None, "rows have to be bound to an instant"
        is_old: pw.Node = self.since < self.now - self.older_than
        return is_old if where is None else pw.Expression(is_old, "AND", where)

    @property
    def looks_due(self) -> pw.Node:
        """The condition of the rows of this share that are deleted unless something keeps them."""
        return (
            self.condition_of_all_shares
            if self.share is None
            else pw.Expression(self.condition_of_all_shares, "AND", self.share)
        )

    @cached_property
    def kept_conditions(self) -> dict[str, pw.Node]:
        """The conditions of rows that look due and stay, by reason: excluded, or kept by a declaration.

        Asks the database which relations there are.
        """
        declared = {one.reason: one.where for one in self.kept if exclusions.is_visible(one.model)}
        if self.project is None and self.name is None:
            return declared
        return {
            exclusions.EXCLUDED_REASON: exclusions.excluded_condition(self.batch, project=self.project, name=self.name)
        } | declared

    def write_kept_conditions(self) -> dict[str, str]:
        """Return the conditions of `kept` in SQL that contains their values."""
        return {reason: exclusions.condition_sql(self.model, kept) for reason, kept in self.kept_conditions.items()}

    @property
    def due_condition(self) -> pw.Node:
        """The condition of the rows to delete."""
        return self._without_kept(self.looks_due)

    @property
    def due_of_all_shares(self) -> pw.Node:
        """The condition of the rows to delete in all shares."""
        return self._without_kept(self.condition_of_all_shares)

    def _without_kept(self, found: pw.Node) -> pw.Node:
        for kept in self.kept_conditions.values():
            found = pw.Expression(found, "AND", exclusions.is_not_true(kept))
        return found

    def select(self, *columns: Any) -> pw.ModelSelect[Row]:
        """Select all rows to delete, also locked rows and bad records."""
        return self.model.select(*columns).where(self.due_condition, self.since.is_null(False))

    @property
    def stay_reasons(self) -> dict[str, str]:
        """The conditions of rows that stay although their time has passed, by reason."""
        return dict(self.stays) | dict(self.waits)

    @property
    def shown_followers(self) -> Sequence[type[Base]]:
        """The models of rows that follow these and that people see separately."""
        return self.cascades_to if self.shows_followers else ()

    @cached_property
    def cascades(self) -> Cascades:
        """The rows that foreign keys delete or change with these.  Asks the database."""
        return Cascades.find(TargetRelation.find(self.model), self.cascades_to)

    @property
    def follower_models(self) -> list[type[Base]]:
        """The models, other than this one, of the rows that are counted with these.  Asks the database."""
        return (
            [self.cascades.models[place] for place in self.cascades.follower_verbs if place] if self.cascades_to else []
        )

    def count_with_followers(self, bound: int) -> dict[int, int]:
        """Count the rows and their followers, *bound* in all, by places of ``cascades.models``."""
        (key,) = self.model._meta.get_primary_keys()
        if not self.cascades_to or not self.cascades.links:
            return {0: self.select(key).limit(bound).count()}
        where = exclusions.condition_sql(
            self.model, pw.Expression(self.due_condition, "AND", self.since.is_null(False))
        )
        statement = self.cascades.count_statement(column_name(key), where, limit="%(bound)s")
        return dict(database.execute_sql(statement, {"bound": bound}).fetchall())

    def select_of_all_shares(self) -> pw.ModelSelect[Row]:
        """Select the rows that look due in all shares."""
        return self.model.select().where(self.condition_of_all_shares, self.since.is_null(False))


@dataclass(frozen=True)
class Changes(Rows[Row]):
    """Rows that the batch's own *statement* changes page by page, instead of deleting them.

    The statement uses the page's keys ``%(ids)s``, the run's time ``%(now)s`` and the condition ``{due}``.  Its part
    ``changed`` returns a row for each changed row, with the key as ``id``.  Behind its last part it has ``{recorded}``:
    there the engine writes the audit and counts.  It repeats the condition in the change itself, so that rows that
    another session changes meanwhile stay.  Raises `Mistake` if the statement lacks any of these, except the time.

    *each* is called with each row of ``changed`` after the commit: it may log the row, and returns numbers to add to
    fields of the result.  The audit keeps the expressions of *audit*, over ``changed``.  Fields ``skipped`` and
    ``failed`` of the result count rows that changed meanwhile, and bad records.  With *notice*, names with expressions
    of SQL over ``changed``, each changed row leaves a row with this detail in the table ``notices``, which the forge's
    own programs read and delete.

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
        """The privileges that processes need on the relation; the statement knows the columns."""
        return "worker: select, update; exporter: select"

    def __post_init__(self) -> None:
        """Refuse a statement that the engine cannot record."""
        super().__post_init__()
        for part in ("%(ids)s", "{due}", "{recorded}", "changed as"):
            if part not in self.statement:
                raise Mistake(f"Changes of {self.record}: its statement lacks {part}")


@dataclass(frozen=True)
class EnqueueCounts:
    """Numbers of messages that were enqueued, and that were on their way or skipped by a hook.

    *queue_full* says that the fan-out stopped early.
    """

    enqueued: int = 0
    deduplicated: int = 0
    queue_full: bool = False


@dataclass(frozen=True)
class Children(Answer):
    """A message to *child* for each item of *of*, unless a message with its key is on its way.

    *of* has an id for each child, or a tuple of its arguments as JSON has them; or it maps keys to such tuples, for
    children whose arguments are not unique.  Sending a child twice is harmless, and losing a child only costs time.
    Each bucket of `Buckets` gets a child.  *sent* names the field of the result that counts sent children, *all_of* a
    field that counts children on their way, too.  If the first argument of each child is a project's id (*by_project*),
    excluded projects get no child.  A message has up to *per_message* children, which one thread executes in turn:
    children with little work share a message, so that they share its reads.

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
    per_message: int = 1

    def iterate_calls(self) -> Iterator[KeyedArguments]:
        """Yield the key and the arguments of each child."""
        if isinstance(self.of, Buckets):
            said = f"buckets {self.of.name} that their batch does not declare: write buckets= in @batch, too"
            raise Mistake(f"{self.child.name} is sent for the {said}")
        if isinstance(self.of, Mapping):
            pairs: Iterable[KeyedArguments] = self.of.items()
        else:
            tuples = (one if isinstance(one, tuple) else (one,) for one in self.of)
            # As JSON: ("a:b", "c") and ("a", "b:c"), 7 and "7" are different children.
            pairs = ((":".join(map(dumps, arguments)), arguments) for arguments in tuples)
        for key, arguments in pairs:
            yield f"{self.child.name}:{key}", arguments


@dataclass(frozen=True)
class Skip(Answer):
    """A run that does nothing, for a *reason* that result, log and metrics show.

    `metrics.catalogue.SKIP_REASONS` lists the reasons.

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
    """Number of due records, at most `queries.MAX_COUNTED_ROWS`, and when the oldest became due."""

    records: int
    oldest: datetime | None = None

    @classmethod
    def from_query(cls, query: pw.ModelSelect[Any], *, oldest: pw.Field[Any], after: timedelta = NO_DELAY) -> Backlog:
        """Count the rows of *query*; each became due the time *after* past its instant *oldest*.

        Without an order, only the counted rows are compared to find the oldest.
        """
        found = query.select(oldest.alias("due")).limit(queries.MAX_COUNTED_ROWS)
        row = pw.Select([found], [pw.fn.count(pw.SQL("1")), pw.fn.min(found.c.due)]).bind(database).tuples().execute()
        records, instant = row[0]
        return cls(records, instant and instant + after)


def ask_for_answers(name: str, due: DueFunction, now: datetime) -> list[Answer]:
    """Return the batch's answers at an instant; raise `Mistake` for any other value."""
    answer = due(now)
    answers = [answer] if isinstance(answer, Answer) or answer is None else list(answer)
    for one in answers:
        if not isinstance(one, Answer):
            raise Mistake(f"{name} answers with {one!r}: return Rows, Objects, Refs, Children or Skip")
    return answers


def ask_for_rows(batch: str, due: DueFunction, now: datetime) -> list[Rows[Any]]:
    """Return the batch's due rows at an instant; raise `Mistake` as `ask_for_answers` does."""
    return [one.bind(batch, now) for one in ask_for_answers(batch, due, now) if isinstance(one, Rows)]


def require_table(model: Any, answer: str) -> str:
    """Return the name of a *model*; raise `Mistake` unless it is a class that inherits from `Table`."""
    if not (isinstance(model, type) and issubclass(model, Base)):
        raise Mistake(f"{answer} of {model!r}: write a class that inherits from forgekeeper.Table")
    return model.__name__


def default_record_name(model: type[Base]) -> str:
    """Return the default name of a row of *model* in metrics, audit and previews."""
    return WORD_BOUNDARY.sub("_", model.__name__).lower()

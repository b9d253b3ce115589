"""The decorators that declare a batch and its children, and all that is derived from what they answer.

Declaring does nothing: `forgekeeper.delivery.broker` makes actors of what has been declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack

import peewee as pw

from forgekeeper.api.answers import (
    Answer,
    Changes,
    Due,
    Mistake,
    Rows,
    Subject,
    answers_of,
    record_of,
    rows_of,
)
from forgekeeper.api.batches import BATCHES, BatchSpec, ChildSpec, Declared, Record, Threshold, register
from forgekeeper.api.buckets import COUNTED, LOOP_LIMIT, Buckets
from forgekeeper.api.housekeeping import Housekeeping
from forgekeeper.api.items import Items
from forgekeeper.api.objects import Objects, Register
from forgekeeper.api.refs import Refs
from forgekeeper.api.shown import Look, Part
from forgekeeper.engine.buckets import NO_BUCKET, show_buckets
from forgekeeper.engine.declaration import require_declarable
from forgekeeper.engine.declared_refs import (
    SOME_PROJECT,
    derive_from_refs,
    records_of_refs,
    refuse_other_arguments,
    refuse_refs,
    result_of_refs,
)
from forgekeeper.engine.deleted_rows import count_recoverable
from forgekeeper.engine.divided import FanOutOutcome, make_fan_out, make_share, require_divisible
from forgekeeper.engine.due_rows import backlog_of, show_waiting, stake_of
from forgekeeper.engine.housekeeping import RECORDS, HousekeepingOutcome, preview_old_records
from forgekeeper.engine.queued_objects import (
    count_backlog,
    find_some_objects,
    preview_objects,
    refused_objects,
    stake_of_objects,
)
from forgekeeper.engine.registered_facts import REGISTER_TABLES, register_fields, register_records, require_register
from forgekeeper.engine.registered_looks import show_register
from forgekeeper.engine.restoring import RestorableRows, subject_of
from forgekeeper.engine.rows import parts_of
from forgekeeper.engine.work import using, work
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.notices import Notice
from forgekeeper.platform.database import Base
from forgekeeper.platform.settings import Place, Settings
from forgekeeper.sources.outbox import tables_of
from metrics.catalogue import Counter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Ids = ParamSpec("Ids")
Spec = TypeVar("Spec", bound=Declared)
Asked: TypeAlias = "Callable[[datetime], Answer | Iterable[Answer]]"
"""What a batch is: it says what goes at an instant."""
ChildAsked: TypeAlias = "Callable[Concatenate[datetime, Ids], Answer | Iterable[Answer]]"
CASCADED = "cascaded"
"""The field of a result that counts rows which foreign keys deleted or changed, and the record of that metric."""
FOLLOWED = "was deleted or changed by a foreign key"
ANY_INSTANT = datetime(2000, 1, 1, tzinfo=UTC)
"""At which a batch is asked what it would delete, for the shape of its answer alone."""
DERIVED = {"time_limit", "outcome", "due", "records", "more_records", "collector"}
"""Options that are no field of a declaration: others have their place, or say what is left out."""
OBJECT_FIELDS: list[tuple[str, type, Any]] = [
    *((name, int, field(default=0)) for name in ("deleted", "missing", "failed", "remaining")),
    ("stopped", str, field(default="drained")),
    ("kept", int, field(default=0)),
]
"""The result of a run that deletes objects: *remaining* are due afterwards, other rows name those that are *kept*."""
MARGIN = timedelta(minutes=1)
"""So long after its budget a run is killed, unless its declaration says another time."""


class Options(TypedDict, total=False):
    """What batches and children may both declare; `batch` says what it means."""

    time_limit: timedelta
    outcome: type[DataclassInstance]
    records: Sequence[Record]
    more_records: Sequence[Record]
    thresholds: Sequence[Threshold]
    counters: Sequence[Counter]
    collector: str


class OfBatch(Options, total=False):
    """What batches alone may declare."""

    document: int
    team: str
    queue: str
    writes: str
    flag: str
    flags: Mapping[str, str]
    tables: Sequence[type[Base]]
    reads: Sequence[type[Base]]
    deletes_from: Place
    released_with: str
    logged_as: str
    commands: str
    buckets: Buckets


class OfChild(Options, total=False):
    """What children alone may declare."""

    due: Due
    enqueued_as: str
    continues: Sequence[str]
    lease: bool


def batch(
    *, cron: str, budget: timedelta, child_per: pw.Field[Any] | None = None, **facts: Unpack[OfBatch]
) -> Callable[[Asked], BatchSpec]:
    """Declare a batch: a function of the time that returns what goes now; its first sentence says what it does.

    It returns `Rows`, `Items`, `Children` or `Skip`, several `Rows` as a list, or yields them.  From the answer follow
    the run, the preview, the backlog, what the breaker weighs, limits, pace, stop, audit, counters and settings.  The
    function only looks: a run's session cannot write.  *writes* says why a batch has to write by itself all the same:
    then nothing of that is kept for what it writes, and `check` says so.

    *cron* has five fields, or six with seconds first; the setting ``CRON_…`` replaces it.  *budget* is how long a run
    may take before it stops by itself.  Of *tables*, and of those that it only *reads*, it is asked before each run
    whether they are as their models say, and whether its statements would misread them.
    *released_with* names the batch that creates its records: in a new installation the release of that batch releases
    this one too.  *flags* has the flags that it reads and their descriptions; *flag* switches the batch off.
    *logged_as* is what the last line of a run calls the whole result, besides its fields.  *commands* is a module,
    imported by the command line alone, whose `COMMANDS` maps names to commands or groups.  With *buckets* its children
    share its rows: it sends them by ``Children(child, BUCKETS)``.

    With *child_per*, a column, the run deletes nothing itself: it sends a child to *queue* for each value of the column
    in the rows that are due, the oldest first, and each child deletes the rows with its value.  Preview, backlog,
    breaker and limits remain those of the whole answer.

    What both batches and children take: after *time_limit*, a minute more than its budget, a run is killed.  *outcome*
    is a dataclass for the result, *records* say which of its fields count what: both follow from `Rows` and `Items`.
    *more_records* come after those.  A function with *records* of its own is not asked before a run.  *thresholds* are
    numbers beyond which alerts fire, *counters* are of its own.  *collector* is the exporter's label for what reads its
    backlogs, if not its name.

    Raises `Mistake` for an answer that cannot be worked on, and for a name that another has.
    """
    if child_per is None:
        return lambda function: _declared(BatchSpec, function, budget, facts, cron=cron)
    return lambda function: _declare_divided(function, child_per, cron, budget, facts)


def child(
    of: BatchSpec, *, queue: str, budget: timedelta, **facts: Unpack[OfChild]
) -> Callable[[ChildAsked[Ids]], ChildSpec]:
    """Declare the child of a batch's fan-out: a function of the time and of ids that returns what goes now.

    It answers as a batch does.  *due* says what is due to all children together: only what is among that goes.  It
    starts its successor when it has stopped for a reason among *continues*.  *enqueued_as* is the field of its parent's
    result that counts those sent.  With *lease* it does nothing while another works on what its first id names.
    From `Refs` all of this follows.

    If the batch has buckets, the function takes the time alone and returns `Rows` of all classes: the child deletes
    those of the bucket that it claims.
    """
    parent: dict[str, Any] = {"of": of, "document": of.document, "team": of.team, "whole": facts.get("due")}
    if of.buckets is not None:
        parent |= {"continues": facts.get("continues", ("deadline", LOOP_LIMIT))}
    return lambda function: _declared(ChildSpec, function, budget, facts, queue=queue, **parent)


def _declare_divided(
    function: Asked, column: pw.Field[Any], cron: str, budget: timedelta, facts: Mapping[str, Any]
) -> BatchSpec:
    """Declare a batch whose rows the *column* divides, and its child."""
    name, child = function.__name__, f"{function.__name__}_child"
    require_declarable(function, {"cron": cron, "budget": budget, **facts}, OfBatch.__annotations__)
    require_divisible(name, _shape_of(name, function), column, facts)
    of_run = {key: value for key, value in facts.items() if key != "queue"} | {"outcome": FanOutOutcome, "records": ()}
    spec = _declared(BatchSpec, make_fan_out(function, column, child), budget, of_run, cron=cron)
    of_child = {key: facts[key] for key in ("time_limit", "collector") if key in facts} | {"due": function}
    parent = {"of": spec, "document": spec.document, "team": spec.team}
    _declared(ChildSpec, make_share(function, column, child), budget, of_child, queue=facts["queue"], **parent)
    return spec


def _declared(
    kind: type[Spec], function: Callable[..., Any], budget: timedelta, facts: Mapping[str, Any], **more: Any
) -> Spec:
    """Make the declaration, and derive from what the function answers with what its facts do not say."""
    options = OfBatch.__annotations__ if kind is BatchSpec else OfChild.__annotations__
    timetable: dict[str, Any] = {name: more[name] for name in ("cron", "queue") if name in more}
    require_declarable(function, {"budget": budget, **facts, **timetable}, options)
    name, due, records = function.__name__, facts.get("due"), facts.get("records")
    buckets = facts.get("buckets") or (more["of"].buckets if kind is ChildSpec else None)
    shared = buckets if kind is ChildSpec else None
    # A batch with buckets answers with its child, which is declared after it.
    asked = (shared or due) is not None or (records is None and facts.get("writes") is None and buckets is None)
    answers = _ask_shape(kind, name, function, function if shared else due) if asked else []
    rows, items = [one for one in answers if isinstance(one, Rows)], [one for one in answers if isinstance(one, Items)]
    objects = [one for one in answers if isinstance(one, Objects)]
    if any(isinstance(one, Housekeeping) for one in answers):
        facts = {"outcome": HousekeepingOutcome, "more_records": RECORDS, "tables": [JobRun], **facts}
    derived = (*_records(rows, items, objects), *records_of_refs(answers))
    declared = kind(
        name=name,
        sentence=(function.__doc__ or "").strip().split("\n")[0],
        module=function.__module__,
        work=partial(work, function),
        budget=budget,
        time_limit=facts.get("time_limit") or budget + MARGIN,
        outcome=facts.get("outcome") or result_of_refs(name, answers) or _outcome(name, rows, items, objects, buckets),
        records=(*(derived if records is None else records), *facts.get("more_records", ())),
        collected_as=facts.get("collector") or name,
        **({key: value for key, value in facts.items() if key not in DERIVED} | more),
    )
    _check(declared, buckets, answers)
    _name_tables(declared.batch, objects)
    for one in rows:
        _name_tables_of_rows(declared, one)
    register(declared)
    _complete(declared, answers, due or function)
    return declared


def _check(declared: Declared, buckets: Buckets | None, answers: Sequence[Answer]) -> None:
    """Raise `Mistake` for a register or buckets that the declaration does not fit."""
    for answer in answers:
        if isinstance(answer, Objects) and isinstance(answer.source, Register):
            require_register(declared, answer, answers)
    if buckets is not None and isinstance(declared, BatchSpec):
        _check_buckets(declared, buckets)
        show_buckets(declared, buckets)
    elif buckets is not None:
        _check_classes(declared.name, buckets, [one for one in answers if isinstance(one, Rows)])


def _complete(declared: Declared, answers: Sequence[Answer], due: Due) -> None:
    """Let everybody who asks about the records be answered by the answers."""
    for answer in answers:
        if isinstance(answer, Objects):
            _derive_from_objects(declared, answer)
        elif isinstance(answer, Housekeeping):
            declared.preview(partial(preview_old_records, answer))
        elif isinstance(answer, Rows) and answer.model.grants == Base.grants:
            # A model that two batches answer with says itself what both need.
            answer.model.grants = answer.grants
    derive_from_refs(declared, answers)
    if rows := [one for one in answers if isinstance(one, Rows)]:
        _derive(declared, rows, due)


def _shape_of(name: str, due: Due) -> list[Answer]:
    """Ask what would go, at any instant, for the shape of the answer; nothing of it is executed."""
    try:
        return answers_of(name, due, ANY_INSTANT)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(
            f"{name} cannot say what it deletes before it runs ({type(error).__name__}: {error}):"
            " build the expression alone, or declare records=, tables= and outcome="
        ) from error


def _name_tables(spec: BatchSpec, objects: Sequence[Objects[Any]]) -> None:
    """Name the tables and places that a batch's objects are in, and the tables that keep some."""
    for one in objects:
        keepers = [model for model in one.unless or () if model is not None]
        spec.tables = tuple(dict.fromkeys((*spec.tables, *_tables_of(one))))
        spec.reads = tuple(dict.fromkeys((*keepers, *spec.reads)))
        spec.deletes_from = spec.deletes_from or "stores"


def _tables_of(objects: Objects[Any]) -> tuple[type[Base], ...]:
    return REGISTER_TABLES if isinstance(objects.source, Register) else (objects.source.model,)


def _ask_shape(kind: type[Declared], name: str, function: Callable[..., Any], due: Due | None) -> list[Answer]:
    """Ask a batch, or a child, for the shape of its answer."""
    if kind is ChildSpec and due is None:
        return _shape_of_child(name, function)
    answers = _shape_of(name, due or function)
    refuse_refs(name, answers, of_child=kind is ChildSpec)
    return answers


def _shape_of_child(name: str, function: Callable[..., Any]) -> list[Answer]:
    """Ask a child without due= about some project, for the shape of its `Refs`: these are the same for each."""
    answers = _shape_of(name, lambda now: function(now, SOME_PROJECT))
    refuse_refs(name, answers, of_child=True)
    for answer in answers:
        if not isinstance(answer, Refs):
            raise Mistake(f"{name} has no due=: it says what is due to all children together")
        refuse_other_arguments(name, answer, partial(function, ANY_INSTANT, SOME_PROJECT, True))
    return answers


def _name_tables_of_rows(declared: Declared, rows: Rows[Any]) -> None:
    """Name the tables that the deletion of rows needs, and the column by which they are found."""
    batch = declared.batch
    needed = [] if rows.total is None else [rows.total.kept.model]
    needed += [] if rows.outbox is None else tables_of(rows.outbox)
    needed += [one.model for one in rows.spared]
    needed += [Notice] if isinstance(rows, Changes) and rows.notice else []
    found = (rows.model, *needed)
    # Tables that a batch names besides those of its child's rows are of less importance.
    tables = (*batch.tables, *found) if declared is batch else (*found, *batch.tables)
    batch.tables = tuple(dict.fromkeys(tables))
    batch.walks[rows.model] = rows.since.column_name
    followers = (model for model in rows.cascades_to if model not in batch.tables)
    batch.reads = tuple(dict.fromkeys((*batch.reads, *followers)))


def _derive_from_objects(declared: Declared, objects: Objects[Any]) -> None:
    """Let everybody who asks about the objects be answered by the source that the run claims from."""
    if isinstance(objects.source, Register):
        show_register(declared, objects)
        return
    batch = declared.batch.name
    if objects.source.model.grants == Base.grants:
        objects.source.model.grants = "worker: select, update, delete; exporter: select"
    declared.backlog(objects.record)(partial(count_backlog, objects, batch))
    declared.batch.at_stake(partial(stake_of_objects, objects, batch))
    declared.preview(partial(preview_objects, objects))
    declared.quarantines(refused_objects(objects, batch))
    declared.batch.audited(Subject(objects.called, "ID", objects.record, because="it was due at {due}"))
    declared.batch.objects(partial(find_some_objects, objects))
    declared.batch.emptied.append(objects.source.model)


def _check_buckets(batch: BatchSpec, buckets: Buckets) -> None:
    """Refuse buckets that another batch has, and flags that nobody describes."""
    for other in BATCHES.values():
        if other.buckets is not None and other.buckets.name == buckets.name:
            raise Mistake(f"{batch.name} has the buckets {buckets.name}, as {other.name} has: rename one of them")
    for flag in buckets.count_with:
        if flag not in batch.flags:
            raise Mistake(f"{batch.name}: its buckets ask the flag {flag}; describe it in flags=")


def _check_classes(name: str, buckets: Buckets, rows: Sequence[Rows[Any]]) -> None:
    """Refuse rows that the buckets cannot divide."""
    most, classes = max(buckets.counts), [one.classes for one in rows]
    if not rows or None in classes:
        raise Mistake(f"{name} works in buckets: return Rows with classes=, by which the buckets divide them")
    for count in (one.count for one in classes if one is not None):
        if count < most:
            raise Mistake(f"{name} has {most} buckets and {count} classes: a bucket is one class at least")


def _outcome(
    name: str,
    rows: Sequence[Rows[Any]],
    items: Sequence[Items[Any]],
    objects: Sequence[Objects[Any]],
    buckets: Buckets | None,
) -> type[DataclassInstance]:
    """Make what a run comes to: a field for what each counts, the chunks, and why it stopped."""
    if objects:
        found = register_fields(objects[0]) if isinstance(objects[0].source, Register) else OBJECT_FIELDS
        return make_dataclass("Outcome", found, namespace={"__doc__": f"Of {name}."})
    if buckets is not None:
        return _outcome_in_buckets(name, rows)
    counted = [one for each in rows for one in (each.counted, each.counted_bytes, "batches") if one]
    counted += [one for each in items for one in (*each.processed, *each.failed)]
    fields = [(one, int, field(default=0)) for one in dict.fromkeys(counted)]
    if any(one.shown_followers for one in rows):
        fields.append((CASCADED, int, field(default=0)))
    stopped = ("stopped", str, field(default="drained"))
    return make_dataclass("Outcome", [*fields, stopped], namespace={"__doc__": f"Of {name}."})


def _outcome_in_buckets(name: str, rows: Sequence[Rows[Any]]) -> type[DataclassInstance]:
    """Make the result of a batch with buckets: their counts and the children, or of its child: the bucket and its rows.

    A child's result grows with each chunk.
    """
    counted = [one for each in rows for one in (each.counted, each.counted_bytes) if one]
    if any(one.shown_followers for one in rows):
        counted.append(CASCADED)
    fields: list[tuple[str, Any, Any]] = [
        (one, int, field(default=0)) for one in dict.fromkeys(counted or (*COUNTED, "children_enqueued"))
    ]
    if rows:
        bucket = ("bucket", int | None, field(default=None))
        fields = [bucket, *fields, ("stopped", str, field(default=NO_BUCKET))]
    return make_dataclass("Outcome", fields, namespace={"__doc__": f"Of {name}."})


def _records(
    rows: Sequence[Rows[Any]], items: Sequence[Items[Any]], objects: Sequence[Objects[Any]]
) -> tuple[Record, ...]:
    """Say how all that the batch deletes is counted."""
    followers = [Record(CASCADED, processed=(CASCADED,))] if any(one.shown_followers for one in rows) else []
    of_objects = [record for one in objects for record in _object_records(one)]
    return (*map(_record, rows), *followers, *map(_items, items), *of_objects)


def _record(rows: Rows[Any]) -> Record:
    """Say how rows are counted; the outcome of those that are changed has fields of its own for bad ones."""
    counted, size = (rows.counted,), (rows.counted_bytes,) if rows.counted_bytes else ()
    by = _excluded_by(project=rows.project, pattern=rows.name)
    if isinstance(rows, Changes):
        return Record(rows.record, processed=counted, objective=rows.objective, excluded_by=by)
    return Record(rows.record, counted, counted, {"database": ()}, objective=rows.objective, bytes=size, excluded_by=by)


def _items(items: Items[Any]) -> Record:
    """Say how items are counted."""
    errors = {"database": ()} if items.keyed else {}
    examined, by = (*items.processed, *items.failed), _excluded_by(project=items.project, pattern=items.called_by)
    return Record(items.record, examined, items.processed, errors, objective=items.objective, excluded_by=by)


def _object_records(objects: Objects[Any]) -> tuple[Record, ...]:
    """Say how objects are counted, and those that were given up."""
    if isinstance(objects.source, Register):
        return register_records(objects)
    done, by = ("deleted", "missing"), _excluded_by(project=objects.project, pattern=objects.path)
    errors = {"database": (), "object_storage": ("failed",)}
    counted = Record(objects.record, (*done, "failed"), done, errors, objective=objects.objective, excluded_by=by)
    return counted, Record(f"dead_{objects.called}", refused=True)


def _excluded_by(**found: object) -> tuple[str, ...]:
    return tuple(kind for kind, by in found.items() if by is not None)


def _derive(declared: Declared, rows: Sequence[Rows[Any]], due: Due) -> None:
    """Let everybody who asks about the records be answered by what the run deletes by."""
    for one in rows:
        if one.objective is not None:
            declared.backlog(one.record)(partial(backlog_of, declared.batch.name, due, one.record))
        declared.batch.audited(_subject(declared.batch, one))
        for model in (model for model in one.shown_followers if model is not one.model):
            record = record_of(model)
            declared.batch.audited(Subject(record, "ID", record, gone=FOLLOWED, because="it led to {deleted_with}"))
        if one.waits:
            show_waiting(declared.batch, one, subject_of(one).called, due)
    declared.preview(partial(_previewed, declared.batch.name, due))
    declared.shows_rows(partial(_show_rows, declared.batch.name, due))
    if any(one.objective for one in rows):
        declared.batch.at_stake(partial(stake_of, declared.batch.name, due))


def _show_rows(name: str, due: Due, now: datetime, settings: Settings) -> list[Rows[Any]]:
    with using(settings):
        return rows_of(name, due, now)


def _subject(batch: BatchSpec, rows: Rows[Any]) -> Subject:
    """Return how people ask for a row; if it can be restored with its object, also how that is done."""
    subject = subject_of(rows)
    if not rows.restorable or rows.outbox is None:
        return subject
    batch.restorable.append(rows)
    kind = RestorableRows(rows)
    return subject._replace(
        restore=f"forgekeeper objects hold --{kind.called} {{id}}",
        restore_run="forgekeeper objects hold --run {run}",
        undone="rows and objects come back until their objects go: FORGEKEEPER_OBJECT_GRACE after them",
        kept="object_grace",
        obstacle=kind.describe_obstacle,
        count_recoverable=partial(count_recoverable, kind),
        is_there=kind.exists,
    )


def _previewed(name: str, due: Due, look: Look) -> Iterator[Part]:
    with using(look.settings):
        all_rows = rows_of(name, due, look.now)
    for number, rows in enumerate(all_rows):
        yield from parts_of(rows, look.within_share(1 / (len(all_rows) - number)))

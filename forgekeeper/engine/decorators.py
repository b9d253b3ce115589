"""The decorators that declare a batch and its children.

Declaring does nothing: `forgekeeper.delivery.broker` makes actors of the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack

import peewee as pw

from forgekeeper.api.answers import Answer, DueFunction
from forgekeeper.api.batches import BatchSpec, ChildSpec, Declaration, Threshold, register_declaration
from forgekeeper.api.buckets import LOOP_LIMIT_REASON, Buckets
from forgekeeper.api.mistakes import Mistake
from forgekeeper.api.objects import Objects
from forgekeeper.api.records import Record
from forgekeeper.engine import declared_buckets
from forgekeeper.engine.answer_kinds import AnswerKind, ask_batch_shape, ask_child_shape, choose_kind
from forgekeeper.engine.child_per_value import (
    FanOutOutcome,
    make_child_function,
    make_fan_out_function,
    require_divisible,
)
from forgekeeper.engine.declaration_checks import require_declarable
from forgekeeper.engine.work import execute_answers
from forgekeeper.platform.database import Base
from forgekeeper.platform.settings import DeletionPlace
from metrics.catalogue import Counter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Ids = ParamSpec("Ids")
Spec = TypeVar("Spec", bound=Declaration)
BatchFunction: TypeAlias = "Callable[[datetime], Answer | Iterable[Answer]]"
"""The function of a batch: it returns the records that are due at an instant."""
ChildFunction: TypeAlias = "Callable[Concatenate[datetime, Ids], Answer | Iterable[Answer]]"
RENAMED_OPTIONS = {"time_limit", "outcome", "due", "records", "more_records", "collector"}
"""Options that a declaration stores under other names."""
TIME_LIMIT_MARGIN = timedelta(minutes=1)
"""Time from the end of the budget until a run is killed, unless its declaration has a time limit."""


class SharedOptions(TypedDict, total=False):
    """Options of batches and of children; `batch` explains them."""

    time_limit: timedelta
    outcome: type[DataclassInstance]
    records: Sequence[Record]
    more_records: Sequence[Record]
    thresholds: Sequence[Threshold]
    counters: Sequence[Counter]
    collector: str


class BatchDecoratorOptions(SharedOptions, total=False):
    """Options of batches alone."""

    document: int
    team: str
    queue: str
    writes: str
    flag: str
    flags: Mapping[str, str]
    tables: Sequence[type[Base]]
    reads: Sequence[type[Base]]
    deletes_from: DeletionPlace
    released_with: str
    logged_as: str
    commands: str
    buckets: Buckets


class ChildDecoratorOptions(SharedOptions, total=False):
    """Options of children alone."""

    due: DueFunction
    enqueued_as: str
    continues: Sequence[str]
    lease: bool


def batch(
    *, cron: str, budget: timedelta, child_per: pw.Field[Any] | None = None, **facts: Unpack[BatchDecoratorOptions]
) -> Callable[[BatchFunction], BatchSpec]:
    """Declare a batch: a function of the time that returns the records to delete now.

    The first sentence of its docstring describes it.  It returns `Rows`, `Objects`, `Children` or `Skip`, several
    `Rows` as a list, or yields them.  The engine derives the run, the preview, the backlog, the share that the breaker
    judges, limits, pace, stop, audit, counters and settings from the answer.  The function only reads: a run's session
    cannot write.  *writes* says why a batch has to write by itself all the same: then nothing limits or records its
    writes, and `check` says so.

    *cron* has five fields, or six with seconds first; the setting ``CRON_…`` replaces it.  *budget* is the time after
    which a run stops by itself.  Before each run the engine compares *tables*, and tables that the batch only *reads*,
    with their models, and checks whether statements would misread them.  *released_with* names the batch that creates
    its records: in a new installation the release of that batch releases this batch too.  *flags* has the flags that it
    reads and their descriptions; *flag* switches the batch off.  *logged_as* is the name of the whole result in the
    last line of a run, besides its fields.  *commands* is a module, imported by the command line alone, whose
    `COMMANDS` maps names to commands or groups.  With *buckets* its children share its rows: it sends them by
    ``Children(child, BUCKETS)``.

    With *child_per*, a column, the run deletes nothing itself: it sends a child to *queue* for each value of the column
    in the rows that are due, the oldest first, and each child deletes the rows with its value.  Preview, backlog,
    breaker and limits are unchanged.

    Options of batches and children: after *time_limit*, by default a minute more than its budget, a run is killed.
    *outcome* is a dataclass for the result, and *records* say which records its fields count: both follow from the
    answer.  *more_records* come after *records*.  A function with *records* of its own is not asked before a run.
    *thresholds* are numbers beyond which alerts fire, *counters* are its own counters.  *collector* is the exporter's
    label of the collector of its backlogs, by default its name.

    Raises `Mistake` for an answer that the engine cannot execute, and for a name that is taken.

    >>> @batch(cron="*/10 * * * *", budget=timedelta(minutes=1))
    ... def stale_pipelines(now: datetime) -> Rows[Pipeline]:
    ...     \"\"\"Delete pipelines that nothing has touched for a year.\"\"\"
    ...     return Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365))
    """
    if child_per is None:
        return lambda function: _make_declaration(BatchSpec, function, budget, facts, cron=cron)
    return lambda function: _declare_divided(function, child_per, cron, budget, facts)


def child(
    of: BatchSpec, *, queue: str, budget: timedelta, **facts: Unpack[ChildDecoratorOptions]
) -> Callable[[ChildFunction[Ids]], ChildSpec]:
    """Declare the child of a batch's fan-out: a function of the time and of ids.

    It returns the records to delete now, as a batch does.  *due* returns the records that are due to all children
    together: a child deletes only these.  If it stops for a reason among *continues*, its successor is started.
    *enqueued_as* is the field of its parent's result that counts sent children.  With *lease* it does nothing while
    another child has the lease of its first id.  If it returns `Refs`, all of this follows.

    If the batch has buckets, the function takes the time alone and returns `Rows` of all classes: the child deletes the
    rows of the bucket that it claims.

    >>> @batch(cron="0 * * * *", budget=timedelta(minutes=1), records=(), outcome=Counted)
    ... def pipelines_in_shards(now: datetime) -> Children:
    ...     \"\"\"Delete stale pipelines in four shards.\"\"\"
    ...     return Children(delete_pipelines, range(4))
    >>> @child(pipelines_in_shards, queue="shards", budget=timedelta(minutes=5), due=find_stale)
    ... def delete_pipelines(now: datetime, shard: int) -> Rows[Pipeline]:
    ...     \"\"\"Delete the stale pipelines of a shard.\"\"\"
    ...     return Rows(Pipeline, Pipeline.project_id % 4 == shard, since=Pipeline.updated_at)
    """
    parent: dict[str, Any] = {
        "parent_batch": of,
        "document": of.document,
        "team": of.team,
        "due_of_all_children": facts.get("due"),
    }
    if of.buckets is not None:
        if "due" in facts:
            raise Mistake(f"{of.name} has buckets: its child returns all rows that are due; leave out due=")
        parent |= {"continues": facts.get("continues", ("deadline", LOOP_LIMIT_REASON))}
    return lambda function: _make_declaration(ChildSpec, function, budget, facts, queue=queue, **parent)


def _declare_divided(
    function: BatchFunction, column: pw.Field[Any], cron: str, budget: timedelta, facts: Mapping[str, Any]
) -> BatchSpec:
    """Declare a batch whose rows the *column* divides, and its child."""
    name, child = function.__name__, f"{function.__name__}_child"
    require_declarable(function, {"cron": cron, "budget": budget, **facts}, BatchDecoratorOptions.__annotations__)
    answers = ask_batch_shape(name, function)
    require_divisible(name, answers, column, facts)
    of_run = {key: value for key, value in facts.items() if key != "queue"} | {"outcome": FanOutOutcome, "records": ()}
    spec = _make_declaration(BatchSpec, make_fan_out_function(function, column, child), budget, of_run, cron=cron)
    of_child = {key: facts[key] for key in ("time_limit", "collector") if key in facts} | {"due": function}
    # The statement that deletes rows locks them.  Without a lease, another child could close our intents of objects.
    of_child["lease"] = any(isinstance(answer, Objects) for answer in answers)
    parent = {"parent_batch": spec, "document": spec.document, "team": spec.team}
    _make_declaration(
        ChildSpec, make_child_function(function, column, child), budget, of_child, queue=facts["queue"], **parent
    )
    return spec


def _make_declaration(
    spec: type[Spec], function: Callable[..., Any], budget: timedelta, facts: Mapping[str, Any], **more: Any
) -> Spec:
    """Make the declaration; derive from the function's answers everything that the *facts* leave out."""
    options = BatchDecoratorOptions.__annotations__ if spec is BatchSpec else ChildDecoratorOptions.__annotations__
    timetable: dict[str, Any] = {name: more[name] for name in ("cron", "queue") if name in more}
    require_declarable(function, {"budget": budget, **facts, **timetable}, options)
    name, records = function.__name__, facts.get("records")
    answers = _ask_shape(function, facts, more)
    kind = choose_kind(name, answers, in_bucket=_is_in_bucket(more))
    derived = kind.list_records(answers) if records is None else records
    declared = spec(
        name=name,
        sentence=(function.__doc__ or "").strip().split("\n")[0],
        module=function.__module__,
        work=partial(execute_answers, function),
        budget=budget,
        time_limit=facts.get("time_limit") or budget + TIME_LIMIT_MARGIN,
        outcome=facts.get("outcome") or _make_result(name, kind, answers, facts),
        records=(*derived, *facts.get("more_records", ())),
        collected_as=facts.get("collector") or name,
        **({key: value for key, value in facts.items() if key not in RENAMED_OPTIONS} | more),
    )
    kind.check_declaration(declared, answers)
    if isinstance(declared, BatchSpec) and declared.buckets is not None:
        declared_buckets.complete_batch(declared, declared.buckets)
    register_declaration(declared)
    kind.complete_declaration(declared, answers, facts.get("due") or function)
    return declared


def _is_in_bucket(more: Mapping[str, Any]) -> bool:
    return "parent_batch" in more and more["parent_batch"].buckets is not None


def _make_result(
    name: str, kind: AnswerKind, answers: Sequence[Answer], facts: Mapping[str, Any]
) -> type[DataclassInstance]:
    return declared_buckets.make_batch_result(name) if "buckets" in facts else kind.make_result(name, answers)


def _ask_shape(function: Callable[..., Any], facts: Mapping[str, Any], more: Mapping[str, Any]) -> Sequence[Answer]:
    """Ask a batch or a child for the shape of its answers, unless its *facts* say all that would follow from them."""
    name, due = function.__name__, facts.get("due")
    if due is not None or _is_in_bucket(more):
        return ask_batch_shape(name, due or function)
    # A batch with buckets answers with its child, which is declared after it.
    if facts.get("records") is not None or facts.get("writes") is not None or "buckets" in facts:
        return ()
    return ask_child_shape(name, function) if "parent_batch" in more else ask_batch_shape(name, function)

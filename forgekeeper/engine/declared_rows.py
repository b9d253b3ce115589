"""The declaration that follows from `Rows` and `Changes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from forgekeeper.api.answers import Answer, Changes, DueFunction, Rows, Subject, ask_for_rows, default_record_name
from forgekeeper.api.batches import BatchSpec, Declaration
from forgekeeper.api.inspection import PreviewContext, PreviewPart
from forgekeeper.api.records import Record
from forgekeeper.engine.deleted_rows import count_recoverable
from forgekeeper.engine.due_rows import measure_affected_rows, measure_backlog, show_waiting_rows
from forgekeeper.engine.restoring import RestorableRows, describe_subject
from forgekeeper.engine.rows import preview_rows
from forgekeeper.engine.work import use_settings
from forgekeeper.ledger.notices import Notice
from forgekeeper.platform.database import Base
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import list_outbox_tables

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CASCADED_FIELD = "cascaded"
"""The field of a result that counts rows which foreign keys deleted or changed, and the record of that metric."""
CASCADED_EXPLANATION = "was deleted or changed by a foreign key"


def make_result(name: str, answers: Sequence[Answer]) -> type[DataclassInstance]:
    """Return the dataclass for the result of a run: counts of rows and chunks, and why it stopped."""
    rows = select_rows(answers)
    fields = [*count_fields(rows, "batches"), ("stopped", str, field(default="drained"))]
    return make_dataclass("RowResult", fields, namespace={"__doc__": f"Result of {name}."})


def count_fields(rows: Sequence[Rows[Any]], *others: str) -> list[tuple[str, Any, Any]]:
    """Return the fields that count rows, their bytes, *others*, and the rows that follow them."""
    counted = [one for each in rows for one in (each.counted, each.counted_bytes, *others) if one]
    counted += [CASCADED_FIELD] if any(one.shown_followers for one in rows) else []
    return [(one, int, field(default=0)) for one in dict.fromkeys(counted)]


def list_records(answers: Sequence[Answer]) -> Iterator[Record]:
    """Yield how each kind of row is counted, and the rows that follow them."""
    rows = select_rows(answers)
    yield from map(_make_record, rows)
    if any(one.shown_followers for one in rows):
        yield Record(CASCADED_FIELD, processed=(CASCADED_FIELD,))


def check_declaration(_declared: Declaration, _answers: Sequence[Answer]) -> None:
    """Accept the declaration: rows have checked themselves."""


def complete_declaration(declared: Declaration, answers: Sequence[Answer], due: DueFunction) -> None:
    """Add tables, grants, backlog, preview and audit subjects, all by the condition of the run."""
    rows = select_rows(answers)
    for one in rows:
        _declare_tables(declared, one)
        # The model of two batches declares the grants of both itself.
        if one.model.grants == Base.grants:
            one.model.grants = one.grants
    if rows:
        _register_callbacks(declared, rows, due)


def select_rows(answers: Sequence[Answer]) -> list[Rows[Any]]:
    """Return the answers that are rows."""
    return [one for one in answers if isinstance(one, Rows)]


def _make_record(rows: Rows[Any]) -> Record:
    """Return how rows are counted; results of changed rows have their own fields for bad ones."""
    counted, size = (rows.counted,), (rows.counted_bytes,) if rows.counted_bytes else ()
    by = tuple(kind for kind, column in (("project", rows.project), ("pattern", rows.name)) if column is not None)
    if isinstance(rows, Changes):
        return Record(rows.record, processed=counted, objective=rows.objective, excluded_by=by)
    return Record(rows.record, counted, counted, {"database": ()}, objective=rows.objective, bytes=size, excluded_by=by)


def _declare_tables(declared: Declaration, rows: Rows[Any]) -> None:
    """Name the tables that the deletion of rows needs, and the column that finds due rows."""
    batch = declared.batch
    needed = [] if rows.total is None else [rows.total.kept.model]
    needed += [] if rows.outbox is None else list_outbox_tables(rows.outbox)
    needed += [one.model for one in rows.kept]
    needed += [Notice] if isinstance(rows, Changes) and rows.notice else []
    found = (rows.model, *needed)
    # The tables of a child's rows are more important than other tables of its batch.
    tables = (*batch.tables, *found) if declared is batch else (*found, *batch.tables)
    batch.tables = tuple(dict.fromkeys(tables))
    batch.walked_columns[rows.model] = rows.since.column_name
    followers = (model for model in rows.cascades_to if model not in batch.tables)
    batch.reads = tuple(dict.fromkeys((*batch.reads, *followers)))


def _register_callbacks(declared: Declaration, rows: Sequence[Rows[Any]], due: DueFunction) -> None:
    """Add backlog, preview and audit subjects, all by the condition of the run."""
    for one in rows:
        if one.objective is not None:
            declared.add_backlog(one.record)(partial(measure_backlog, declared.batch.name, due, one.record))
        declared.batch.add_subject(_make_row_subject(declared.batch, one))
        for model in (model for model in one.shown_followers if model is not one.model):
            record = default_record_name(model)
            declared.batch.add_subject(
                Subject(record, "ID", record, gone=CASCADED_EXPLANATION, because="it referenced {deleted_with}")
            )
        if one.waits:
            show_waiting_rows(declared.batch, one, describe_subject(one).called, due)
    declared.add_preview(partial(_preview_rows, declared.batch.name, due))
    declared.add_shown_rows(partial(_show_rows, declared.batch.name, due))
    if any(one.objective for one in rows):
        declared.batch.at_stake(partial(measure_affected_rows, declared.batch.name, due))


def _show_rows(name: str, due: DueFunction, now: datetime, settings: Settings) -> list[Rows[Any]]:
    with use_settings(settings):
        return ask_for_rows(name, due, now)


def _make_row_subject(batch: BatchSpec, rows: Rows[Any]) -> Subject:
    """Return how people ask for a row; if it can be restored with its object, also how that is done."""
    subject = describe_subject(rows)
    if not rows.restorable or rows.outbox is None:
        return subject
    batch.restorable.append(rows)
    kind = RestorableRows(rows)
    return subject._replace(
        restore=f"forgekeeper objects hold --{kind.called} {{id}}",
        restore_run="forgekeeper objects hold --run {run}",
        undone="rows and objects can be restored until the objects are deleted, after FORGEKEEPER_OBJECT_GRACE",
        kept="object_grace",
        obstacle=kind.describe_obstacle,
        count_recoverable=partial(count_recoverable, kind),
        is_there=kind.row_exists,
    )


def _preview_rows(name: str, due: DueFunction, look: PreviewContext) -> Iterator[PreviewPart]:
    with use_settings(look.settings):
        all_rows = ask_for_rows(name, due, look.now)
    for number, rows in enumerate(all_rows):
        yield from preview_rows(rows, look.within_share(1 / (len(all_rows) - number)))

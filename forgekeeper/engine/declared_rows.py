"""The declaration that follows from `Rows` and `Changes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from forgekeeper.api.answers import Answer, Changes, Due, Rows, Subject, record_of, rows_of
from forgekeeper.api.batches import BatchSpec, Declared, Record
from forgekeeper.api.shown import Look, Part
from forgekeeper.engine.deleted_rows import count_recoverable
from forgekeeper.engine.due_rows import backlog_of, show_waiting, stake_of
from forgekeeper.engine.restoring import RestorableRows, subject_of
from forgekeeper.engine.rows import parts_of
from forgekeeper.engine.work import using
from forgekeeper.ledger.notices import Notice
from forgekeeper.platform.database import Base
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import tables_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CASCADED = "cascaded"
"""The field of a result that counts rows which foreign keys deleted or changed, and the record of that metric."""
FOLLOWED = "was deleted or changed by a foreign key"


def make_result(name: str, answers: Sequence[Answer]) -> type[DataclassInstance]:
    """Return the dataclass for the result of a run: counts of rows and chunks, and why it stopped."""
    rows = select_rows(answers)
    fields = [*count_fields(rows, "batches"), ("stopped", str, field(default="drained"))]
    return make_dataclass("Outcome", fields, namespace={"__doc__": f"Of {name}."})


def count_fields(rows: Sequence[Rows[Any]], *others: str) -> list[tuple[str, Any, Any]]:
    """Return the fields that count rows, their bytes, *others*, and the rows that follow them."""
    counted = [one for each in rows for one in (each.counted, each.counted_bytes, *others) if one]
    counted += [CASCADED] if any(one.shown_followers for one in rows) else []
    return [(one, int, field(default=0)) for one in dict.fromkeys(counted)]


def list_records(answers: Sequence[Answer]) -> Iterator[Record]:
    """Yield how each kind of row is counted, and the rows that follow them."""
    rows = select_rows(answers)
    yield from map(_record, rows)
    if any(one.shown_followers for one in rows):
        yield Record(CASCADED, processed=(CASCADED,))


def check_declaration(_declared: Declared, _answers: Sequence[Answer]) -> None:
    """Accept the declaration: rows have checked themselves."""


def complete_declaration(declared: Declared, answers: Sequence[Answer], due: Due) -> None:
    """Let every look at the rows use the condition of the run."""
    rows = select_rows(answers)
    for one in rows:
        _name_tables_of_rows(declared, one)
        # A model that two batches answer with says itself which rights both need.
        if one.model.grants == Base.grants:
            one.model.grants = one.grants
    if rows:
        _derive(declared, rows, due)


def select_rows(answers: Sequence[Answer]) -> list[Rows[Any]]:
    """Return the answers that are rows."""
    return [one for one in answers if isinstance(one, Rows)]


def _record(rows: Rows[Any]) -> Record:
    """Return how rows are counted; results of changed rows have their own fields for bad ones."""
    counted, size = (rows.counted,), (rows.counted_bytes,) if rows.counted_bytes else ()
    by = tuple(kind for kind, column in (("project", rows.project), ("pattern", rows.name)) if column is not None)
    if isinstance(rows, Changes):
        return Record(rows.record, processed=counted, objective=rows.objective, excluded_by=by)
    return Record(rows.record, counted, counted, {"database": ()}, objective=rows.objective, bytes=size, excluded_by=by)


def _name_tables_of_rows(declared: Declared, rows: Rows[Any]) -> None:
    """Name the tables that the deletion of rows needs, and the column that finds due rows."""
    batch = declared.batch
    needed = [] if rows.total is None else [rows.total.kept.model]
    needed += [] if rows.outbox is None else tables_of(rows.outbox)
    needed += [one.model for one in rows.spared]
    needed += [Notice] if isinstance(rows, Changes) and rows.notice else []
    found = (rows.model, *needed)
    # The tables of a child's rows are more important than other tables of its batch.
    tables = (*batch.tables, *found) if declared is batch else (*found, *batch.tables)
    batch.tables = tuple(dict.fromkeys(tables))
    batch.walks[rows.model] = rows.since.column_name
    followers = (model for model in rows.cascades_to if model not in batch.tables)
    batch.reads = tuple(dict.fromkeys((*batch.reads, *followers)))


def _derive(declared: Declared, rows: Sequence[Rows[Any]], due: Due) -> None:
    """Let every look at the records use the conditions that the run deletes by."""
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

"""The declaration that follows from `Objects`, whose source is a queue or a register."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forgekeeper.api.answers import Answer, DueFunction, Mistake, Subject
from forgekeeper.api.batches import ChildSpec, Declaration
from forgekeeper.api.objects import Objects, Register
from forgekeeper.api.records import Record
from forgekeeper.engine.object_queue_inspection import (
    count_pending_objects,
    define_object_quarantine,
    measure_affected_objects,
    preview_objects,
    sample_object_paths,
)
from forgekeeper.engine.register_declaration import (
    REGISTER_TABLES,
    list_register_fields,
    list_register_records,
    require_register,
)
from forgekeeper.engine.register_inspection import declare_register_inspection
from forgekeeper.platform.database import Base

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OBJECT_FIELDS: list[tuple[str, type, Any]] = [
    *((name, int, field(default=0)) for name in ("deleted", "missing", "failed", "remaining")),
    ("stopped", str, field(default="drained")),
    ("kept", int, field(default=0)),
]
"""The result of a run that deletes objects.

*remaining* are due afterwards, *kept* are named by other rows.
"""


def make_result(name: str, answers: Sequence[Answer]) -> type[DataclassInstance]:
    """Return the dataclass for the result of a run."""
    first = next(_select_objects(answers))
    fields = list_register_fields(first) if isinstance(first.source, Register) else OBJECT_FIELDS
    return make_dataclass("ObjectResult", fields, namespace={"__doc__": f"Result of {name}."})


def list_records(answers: Sequence[Answer]) -> Iterator[Record]:
    """Yield how objects are counted, and the objects that were given up."""
    for one in _select_objects(answers):
        yield from _make_object_records(one)


def check_declaration(declared: Declaration, answers: Sequence[Answer]) -> None:
    """Raise `Mistake` for a register that the declaration does not fit, and for a child without a share of its own."""
    for one in _select_objects(answers):
        # A child without a share would close the audit's intents of another child that is still at work.
        if isinstance(declared, ChildSpec) and declared.due_of_all_children is not None:
            raise Mistake(
                f"{declared.name} is a child and returns Objects: return them from its batch, with child_per="
            )
        if isinstance(one.source, Register):
            require_register(declared, one, answers)


def complete_declaration(declared: Declaration, answers: Sequence[Answer], _due: DueFunction) -> None:
    """Add tables, backlog, preview, quarantine and audit subject, all from the source that the run claims from."""
    for one in _select_objects(answers):
        _name_tables(declared, one)
        if isinstance(one.source, Register):
            declare_register_inspection(declared, one)
        else:
            _show_queue(declared, one)


def _select_objects(answers: Sequence[Answer]) -> Iterator[Objects[Any]]:
    return (one for one in answers if isinstance(one, Objects))


def _name_tables(declared: Declaration, objects: Objects[Any]) -> None:
    """Name the tables and places of the objects, and the tables that keep some."""
    batch = declared.batch
    keepers = [model for model in objects.unless or () if model is not None]
    tables = REGISTER_TABLES if isinstance(objects.source, Register) else (objects.source.model,)
    batch.tables = tuple(dict.fromkeys((*batch.tables, *tables)))
    batch.reads = tuple(dict.fromkeys((*keepers, *batch.reads)))
    batch.deletes_from = batch.deletes_from or "stores"


def _make_object_records(objects: Objects[Any]) -> tuple[Record, ...]:
    """Return how deleted objects and given-up objects are counted."""
    if isinstance(objects.source, Register):
        return list_register_records(objects)
    done = ("deleted", "missing")
    by = ("pattern",) if objects.project is None else ("project", "pattern")
    errors = {"database": (), "object_storage": ("failed",)}
    counted = Record(objects.record, (*done, "failed"), done, errors, objective=objects.objective, excluded_by=by)
    return counted, Record(f"dead_{objects.called}", refused=True)


def _show_queue(declared: Declaration, objects: Objects[Any]) -> None:
    batch = declared.batch.name
    if objects.queue.model.grants == Base.grants:
        objects.queue.model.grants = "worker: select, update, delete; exporter: select"
    declared.add_backlog(objects.record)(partial(count_pending_objects, objects, batch))
    declared.batch.at_stake(partial(measure_affected_objects, objects, batch))
    declared.add_preview(partial(preview_objects, objects))
    declared.add_quarantine(define_object_quarantine(objects, batch))
    declared.batch.add_subject(
        Subject(objects.called, "ID", objects.record, because="it was due, in the queue since {due}")
    )
    declared.batch.add_known_objects(partial(sample_object_paths, objects))
    declared.batch.emptied_tables.append(objects.queue.model)

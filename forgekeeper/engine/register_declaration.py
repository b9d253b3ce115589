"""Facts of a declaration that follow from its register: tables, records, the fields of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

from forgekeeper.api.answers import Answer, Mistake, Note, Skip
from forgekeeper.api.batches import BATCHES, Declaration
from forgekeeper.api.objects import REGISTER_RESULT, Objects
from forgekeeper.api.records import Record
from forgekeeper.platform.database import Base
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload

REGISTER_TABLES: tuple[type[Base], ...] = (DeletedObject, SettledUpload)
"""Tables of forgekeeper's own that decide about the objects of a register."""


def require_register(declared: Declaration, objects: Objects[Any], answers: Sequence[Answer]) -> None:
    """Raise `Mistake` unless the register is the batch's alone, and its result has all fields."""
    name, register = declared.name, objects.register.name
    if len([one for one in answers if not isinstance(one, (Note, Skip))]) > 1:
        raise Mistake(f"{name} returns a Register and other answers: declare a batch for each")
    for other in (
        one for one in BATCHES.values() if one.registered_objects and one.registered_objects.register.name == register
    ):
        raise Mistake(f"{name}: the register {register!r} belongs to {other.name}; choose another name")
    known = {one.name for one in fields(declared.outcome)}
    for fact, counted in objects.result_fields.items():
        if counted not in known:
            raise Mistake(f"{name}: its outcome has no field {counted!r}; name a field with counted={{{fact!r}: ...}}")


def list_register_fields(objects: Objects[Any]) -> list[tuple[str, type, Any]]:
    """Return the fields of the result of a run on a register."""
    kinds = {"timed_out": bool}
    counted = [
        (name, kinds.get(fact, int), field(default=kinds.get(fact, int)()))
        for fact, name in objects.result_fields.items()
    ]
    return [*counted, ("stopped", str, field(default="drained"))]


def list_register_records(objects: Objects[Any]) -> tuple[Record, ...]:
    """Return the records of a register: pending, due and failed entries."""
    pending, deleted, _timed_out, failed = ((objects.result_fields[fact],) for fact in REGISTER_RESULT)
    errors, by = {"object_storage": failed}, ("pattern",)
    due = Record(objects.record, (), deleted, errors, objective=objects.objective, excluded_by=by)
    called = objects.called
    return Record(f"pending_{called}", pending, backlog=True), due, Record(f"failed_{called}", refused=True)

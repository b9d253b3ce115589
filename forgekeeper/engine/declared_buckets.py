"""The declaration of a batch with buckets, and of the child that works on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any

from forgekeeper.api.answers import Answer, Mistake, Rows
from forgekeeper.api.batches import BATCHES, BatchSpec, Declaration
from forgekeeper.api.buckets import BUCKET_COUNT_FIELDS, Buckets
from forgekeeper.engine.buckets import NO_BUCKET_REASON, show_buckets
from forgekeeper.engine.declared_rows import complete_declaration, count_fields, list_records, select_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["check_declaration", "complete_declaration", "list_records", "make_result"]


def make_result(name: str, answers: Sequence[Answer]) -> type[DataclassInstance]:
    """Return the dataclass for the result of a child: its bucket and the counts of rows."""
    bucket, stopped = ("bucket", int | None, field(default=None)), ("stopped", str, field(default=NO_BUCKET_REASON))
    fields: list[tuple[str, Any, Any]] = [bucket, *count_fields(select_rows(answers)), stopped]
    return make_dataclass("BucketResult", fields, namespace={"__doc__": f"Result of {name}."})


def make_batch_result(name: str) -> type[DataclassInstance]:
    """Return the dataclass for the result of a run: the counts of buckets and children."""
    fields = [(one, int, field(default=0)) for one in (*BUCKET_COUNT_FIELDS, "children_enqueued")]
    return make_dataclass("BucketFanOutResult", fields, namespace={"__doc__": f"Result of {name}."})


def check_declaration(declared: Declaration, answers: Sequence[Answer]) -> None:
    """Raise `Mistake` for rows of a child that the buckets of its batch cannot divide."""
    buckets = declared.batch.buckets
    assert buckets is not None, "the batch has buckets"
    _check_classes(declared.name, buckets, select_rows(answers))


def complete_batch(batch: BatchSpec, buckets: Buckets) -> None:
    """Let exporter, status and counters show the buckets; raise `Mistake` for a name or a flag that does not fit."""
    _check_buckets(batch, buckets)
    show_buckets(batch, buckets)


def _check_buckets(batch: BatchSpec, buckets: Buckets) -> None:
    """Refuse buckets that another batch has, and flags that nobody describes."""
    for other in BATCHES.values():
        if other.buckets is not None and other.buckets.name == buckets.name:
            raise Mistake(f"{batch.name} and {other.name} both have buckets called {buckets.name}: rename one of them")
    for flag in buckets.count_with:
        if flag not in batch.flags:
            raise Mistake(f"{batch.name}: its buckets read the flag {flag}; describe the flag in flags=")


def _check_classes(name: str, buckets: Buckets, rows: Sequence[Rows[Any]]) -> None:
    """Refuse rows that the buckets cannot divide."""
    most, classes = max(buckets.possible_counts), [one.classes for one in rows]
    if not rows or None in classes:
        raise Mistake(f"{name} works in buckets: return Rows with classes=, which divides the rows among the buckets")
    for count in (one.count for one in classes if one is not None):
        if count < most:
            raise Mistake(f"{name} has {count} classes for {most} buckets: declare at least {most} classes")

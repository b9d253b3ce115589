"""Kinds of answers: the module of each kind derives the rest of a declaration from the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from forgekeeper.api.answers import Answer, DueFunction, Mistake, Note, Rows, Skip, ask_for_answers
from forgekeeper.api.batches import Declaration
from forgekeeper.api.housekeeping import Housekeeping
from forgekeeper.api.objects import Objects
from forgekeeper.api.records import Record
from forgekeeper.api.refs import ChildPerRepository, Refs
from forgekeeper.engine import declared_buckets, declared_housekeeping, declared_objects, declared_refs, declared_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAMPLE_INSTANT = datetime(2000, 1, 1, tzinfo=UTC)
"""The instant passed to a batch that is asked for the shape of its answer."""


class AnswerKind(Protocol):
    """A module that derives declarations from answers of one type."""

    def make_result(self, name: str, answers: Sequence[Answer], /) -> type[DataclassInstance]:
        """Return the dataclass for the result of a run or child called *name*."""

    def list_records(self, answers: Sequence[Answer], /) -> Iterable[Record]:
        """Return how the fields of that result count records."""

    def check_declaration(self, declared: Declaration, answers: Sequence[Answer], /) -> None:
        """Raise `Mistake` for a declaration that does not fit the answers."""

    def complete_declaration(self, declared: Declaration, answers: Sequence[Answer], due: DueFunction, /) -> None:
        """Derive tables, backlog, preview, quarantine, audit and more; *due* returns the answers at an instant."""


# A module has no `self`: its functions are the methods.
KIND_BY_ANSWER: dict[type[Answer], AnswerKind] = {
    Rows: declared_rows,
    Objects: declared_objects,
    Refs: declared_refs,
    ChildPerRepository: declared_refs,
    Housekeeping: declared_housekeeping,
}


def choose_kind(name: str, answers: Sequence[Answer], *, in_bucket: bool) -> AnswerKind:
    """Return the kind of the *answers*; with *in_bucket*, the kind of rows in buckets.

    Without answers it is the kind of rows.  Raises `Mistake` for answers of several kinds, because limits, results and
    records belong to one kind.
    """
    if in_bucket:
        return declared_buckets
    kinds = [kind for answer in answers for type_, kind in KIND_BY_ANSWER.items() if isinstance(answer, type_)]
    if any(kind is not kinds[0] for kind in kinds):
        types = ", ".join(sorted({type(one).__name__ for one in answers if not isinstance(one, (Note, Skip))}))
        raise Mistake(f"{name} returns {types}: declare a batch for each")
    return kinds[0] if kinds else declared_rows


def ask_batch_shape(name: str, due: DueFunction) -> list[Answer]:
    """Call the function of a batch to learn the shape of its answers; do not execute the answers.

    Raises `Mistake` if the function only works during a run.
    """
    try:
        return ask_for_answers(name, due, SAMPLE_INSTANT)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(
            f"{name} failed when it was called for its declaration ({type(error).__name__}:"
            f" {error}){_suggest_correction(error)}"
        ) from error


def _suggest_correction(error: Exception) -> str:
    """Return the advice for an error of a function that was asked for its answers."""
    if "uninitialized Proxy" in str(error):
        return ": do not query the database; return the query, and the engine executes it"
    if isinstance(error, (AttributeError, TypeError, NameError)):
        return ""
    return ": only build the query, or declare records=, tables= and outcome="


def ask_child_shape(name: str, function: Callable[..., Any]) -> list[Answer]:
    """Call the function of a child with a sample project to learn the shape of its answers.

    Raises `Mistake` for other answers than `Refs`: only ``due=`` could tell which records are due to all children.
    """
    answers = ask_batch_shape(name, lambda now: function(now, declared_refs.SAMPLE_PROJECT_ID))
    for answer in answers:
        if not isinstance(answer, (Refs, ChildPerRepository)):
            raise Mistake(f"{name} needs due=, a function that returns the due records of all children")
        if isinstance(answer, Refs):
            ask_missing = partial(function, SAMPLE_INSTANT, declared_refs.SAMPLE_PROJECT_ID, True)
            declared_refs.require_ref_arguments(name, answer, ask_missing)
    return answers

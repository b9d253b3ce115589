"""A batch with a child for each value of a column: the run sends the children, and each child deletes its share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import wraps
from typing import Any, Literal, TypeAlias

import peewee as pw

from forgekeeper.api.answers import Answer, Children, DueFunction, Mistake, Rows
from forgekeeper.api.batches import CHILDREN
from forgekeeper.api.objects import Objects, Register
from forgekeeper.sources.queue import QueueTable

MAX_CHILDREN_PER_RUN = 10_000
COLUMN_TYPES = (pw.IntegerField, pw.TextField, pw.CharField)
"""Types of columns whose values a message can hold."""
OPTIONS_FROM_ANSWER = ("outcome", "records", "more_records", "counters")
"""Options that follow from the answer if a batch has a child for each value of a column."""

DivisibleAnswer: TypeAlias = "Rows[Any] | Objects[Any]"


@dataclass
class FanOutOutcome:
    """Numbers of children that a run has sent, and of children that were on their way already."""

    children_enqueued: int = 0
    deduplicated: int = 0
    stopped: Literal["drained", "max_children", "queue_full", "deadline"] = "drained"


def require_divisible(name: str, answers: Sequence[Answer], column: pw.Field[Any], options: Iterable[str]) -> None:
    """Raise `Mistake` unless the *column* divides the only answer of the batch *name*, and its *options* allow that."""
    if len(answers) != 1 or not isinstance(answers[0], Rows | Objects):
        raise Mistake(f"{name}: child_per= needs a single answer; return one Rows or one Objects")
    if isinstance(answers[0], Objects) and isinstance(answers[0].source, Register):
        raise Mistake(f"{name}: child_per= needs a column, and a register has none; leave child_per= out")
    model = answers[0].model if isinstance(answers[0], Rows) else answers[0].queue.model
    if not isinstance(column, COLUMN_TYPES) or column.model is not model:
        raise Mistake(f"{name}: child_per= has to be a column of {model.__name__} with whole numbers or text")
    if "queue" not in options:
        raise Mistake(f"{name}: child_per= needs queue=, the queue of the children; the queue `cron` is for runs")
    if "buckets" in options:
        raise Mistake(f"{name}: child_per= and buckets= both divide rows among children; leave one out")
    for option in OPTIONS_FROM_ANSWER:
        if option in options:
            raise Mistake(f"{name}: with child_per= the engine derives {option}=; leave it out")


def make_fan_out_function(
    due: DueFunction, column: pw.Field[Any], child: str
) -> Callable[[datetime], Generator[Children, None, str]]:
    """Return the function of a run: it sends a *child* for each value of the *column* in the rows that are due.

    The values of the oldest rows come first, `MAX_CHILDREN_PER_RUN` at most.
    """

    @wraps(due)
    def send_children(now: datetime) -> Generator[Children, None, str]:
        answer, spec = _ask_for_answer(due, now), CHILDREN[child]
        values = find_due_values(answer, column, spec.batch.name, now)
        yield Children(spec, [(value,) for value in values], by_project=answer.project is column)
        return "max_children" if len(values) == MAX_CHILDREN_PER_RUN else "drained"

    return send_children


def make_child_function(
    due: DueFunction, column: pw.Field[Any], child: str
) -> Callable[[datetime, Any], DivisibleAnswer]:
    """Return the function of the *child*: the rows whose *column* has its value, None for rows without a value."""

    def find_share(now: datetime, value: Any) -> DivisibleAnswer:
        return replace(_ask_for_answer(due, now), share=column == value)

    find_share.__name__, find_share.__module__, find_share.__doc__ = child, due.__module__, due.__doc__
    return find_share


def find_due_values(answer: DivisibleAnswer, column: pw.Field[Any], batch: str, now: datetime) -> list[Any]:
    """Return the values of the *column* in the rows that are due, the values of the oldest rows first."""
    if isinstance(answer, Rows):
        query, by = answer.bind(batch, now).select(column), answer.since
    else:
        query, by = QueueTable(answer, batch).select_not_excluded(now).select(column), answer.queue.due_at
    oldest_first = query.group_by(column).order_by(pw.fn.min(by), column).limit(MAX_CHILDREN_PER_RUN)
    return [value for (value,) in oldest_first.tuples()]


def _ask_for_answer(due: DueFunction, now: datetime) -> DivisibleAnswer:
    answer = due(now)
    (one,) = [answer] if isinstance(answer, Answer) else answer
    assert isinstance(one, Rows | Objects), "the declaration has checked the answer"
    return one

"""What a batch may answer besides rows, items and children."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any


class Mistake(TypeError):
    """A batch is declared wrongly; the message names it and says what to write instead."""


class Answer:
    """What a batch may return or yield."""


Due = Callable[[datetime], "Answer | Iterable[Answer]"]


def answers_of(name: str, due: Due, now: datetime) -> list[Answer]:
    """Return what the batch answers with at an instant; raise `Mistake` for an answer that is none."""
    answer = due(now)
    answers = [answer] if isinstance(answer, Answer) or answer is None else list(answer)
    for one in answers:
        if not isinstance(one, Answer):
            raise Mistake(f"{name} answers with {one!r}: return Rows, Items, Children or Skip")
    return answers


@dataclass(frozen=True)
class Skip(Answer):
    """The run does nothing, for a *reason* that its result, the log and the metrics show: one of the closed set.

    The reasons are listed in `metrics.catalogue.SKIPS`; a flag that is off is `flag_off`.
    """

    reason: str


class Note(Answer):
    """Fields of the result that the batch itself knows, such as the bucket that a child works on.

    Raises `Mistake` when the run meets it and the outcome has no such field.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


@dataclass(frozen=True)
class Removal(Answer):
    """What *remove* removes, up to so many at a time: it returns how many went.  For forgekeeper's own records alone.

    Each chunk is a transaction with what the audit says of it: how many, by the name *record*; nothing where that is
    None.  *counted* is the field of the result.
    """

    record: str | None
    remove: Callable[[int], int]
    counted: str | None = None
    chunk: int = 1_000

"""What a batch may answer besides rows, items and children."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Mistake(TypeError):
    """A batch is declared wrongly; the message names it and says what to write instead."""


class Answer:
    """What a batch may return or yield."""


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

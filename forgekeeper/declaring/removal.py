"""What the engine removes of its own, by functions that remove it: rows without a number, dead letters, partitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from forgekeeper.declaring.answers import Answer


@dataclass(frozen=True)
class Removal(Answer):
    """What *remove* removes, up to so many at a time: it returns how many went.  For forgekeeper's own records alone.

    Each chunk is a transaction with what the audit says of it: how many, by the name *record*; nothing where that is
    None.  *counted* is the field of the result.
    """

    record: str | None
    remove: Callable[[int], int]
    _: KW_ONLY
    counted: str | None = None
    chunk: int = 1_000

"""The parts of a forge's adoption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class AdoptedPart(NamedTuple):
    """A file of ``sql/`` that creates *views*; it *needs* these tables with these columns.

    A change of rows of these views also changes rows of the tables *also_changes* in the same transaction, if the forge
    has these tables. A part with *unless_table* exists only in forks: the forge itself has that table.
    """

    name: str
    views: Sequence[str]
    needs: Mapping[str, str]
    also_changes: Sequence[str] = ()
    unless_table: str | None = None
